"""A small run whose environments and updates mostly sleep, so that a learner and eight collectors fit on two cores.

An environment sleeps for `STEP_SECONDS` in each step, as one that waits for a simulator elsewhere. An update computes for some
milliseconds and then sleeps for `UPDATE_SECONDS`, as a learner that waits for its GPU.

Arguments: directory, and the fields of `Experiment` to change as JSON. "mode" is a field here, too: "collect" or "learn", as in
``--mode``; "first step" ends after one step and prints the bytes of memory that the process alone has.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from amago import cli_utils
from amago.agent import Agent
from amago.envs import AMAGOEnv
from amago.experiment import Experiment
from amago.loading import DiskTrajDataset
from amago.nets.traj_encoders import FFTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder

STEP_SECONDS, UPDATE_SECONDS = 0.02, 0.2
ACTORS, PHASE, HORIZON, EPOCH, BATCH = 2, 50, 25, 5, 8
"""Of a collector; steps of each; steps of a rollout; updates between two publications; sequences of an update."""
WIDTHS = {
    "FFTstepEncoder.n_layers": 1, "FFTstepEncoder.d_hidden": 32, "FFTstepEncoder.d_output": 32, "FFTrajEncoder.d_model": 32,
    "Actor.d_hidden": 32, "NCritics.d_hidden": 32, "Multigammas.discrete": [0.9],
}  # fmt: skip


class Sleeping(gym.Env[Any, Any]):
    """`HORIZON` steps with random observations and no reward; each step sleeps."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (8,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(STEP_SECONDS)
        self._t += 1
        return self._observe(), 0.0, self._t == HORIZON, False, {}

    def _observe(self) -> Any:
        return self.np_random.random(8, np.float32)


class SleepingExperiment(Experiment):
    """Sleeps after each update."""

    def train_step(self, batch: Any, log_step: bool) -> Any:
        metrics = super().train_step(batch, log_step)
        time.sleep(UPDATE_SECONDS)
        return metrics


def make_env() -> AMAGOEnv:
    return AMAGOEnv(Sleeping(), env_name="Sleeping")


def build(folder: str, mode: str | None = None, **fields: Any) -> SleepingExperiment:
    """The experiment, not started."""
    cli_utils.use_config(dict(WIDTHS))
    defaults: dict[str, Any] = {
        "run_name": "run", "ckpt_base_dir": folder, "dataset": DiskTrajDataset(folder, "run"), "max_seq_len": 16, "batch_size": BATCH,
        "agent_type": Agent, "tstep_encoder_type": FFTstepEncoder, "traj_encoder_type": FFTrajEncoder, "make_train_env": make_env,
        "make_val_env": make_env, "env_mode": "sync", "parallel_actors": ACTORS, "train_timesteps_per_epoch": PHASE,
        "train_batches_per_epoch": EPOCH, "epochs": 1_000_000, "val_interval": None, "val_timesteps_per_epoch": HORIZON + 1, "ckpt_interval": None, "verbose": False,
    }  # fmt: skip
    experiment = SleepingExperiment(**defaults | fields)
    if mode is not None:
        epochs = experiment.epochs
        cli_utils.switch_async_mode(experiment, mode)
        experiment.epochs = epochs  # a process that only collects would run until it is stopped
    return experiment


def own_bytes() -> float:
    """Bytes of main memory that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024.0 * sum(float(line.split()[1]) for line in lines if line.startswith("Private_"))


def main() -> None:
    folder, fields = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    once = fields.get("mode") == "first step"
    experiment = build(folder, **fields | ({"mode": "collect", "epochs": 1, "train_timesteps_per_epoch": 1} if once else {}))
    experiment.start()
    experiment.learn()
    if once:
        print(own_bytes(), flush=True)
    experiment.close()


if __name__ == "__main__":
    main()
