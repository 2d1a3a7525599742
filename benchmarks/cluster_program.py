"""The run that `benchmarks.cluster` times: CartPole with a millisecond of waiting a step. Arguments: directory, actors, workers, epochs, batches, seed."""

from __future__ import annotations

import sys
import time
from typing import Any

import gymnasium as gym

from amago import cli_utils
from amago.agent import Agent
from amago.envs import AMAGOEnv
from amago.envs.exploration import EpsilonGreedy
from amago.experiment import Experiment
from amago.loading import DiskTrajDataset
from amago.nets.traj_encoders import FFTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder

STEP_SECONDS = 0.001
HORIZON, EVALUATED = 500, 16  # rollouts


class Waiting(gym.Wrapper[Any, Any, Any, Any]):
    """Each step takes a millisecond more, in which it computes nothing, as a simulator elsewhere would."""

    def step(self, action: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return self.env.step(action)


def make_env() -> AMAGOEnv:
    return AMAGOEnv(Waiting(gym.make("CartPole-v1")), env_name="CartPole")


def main() -> None:
    folder, (actors, workers, epochs, batches, seed) = sys.argv[1], map(int, sys.argv[2:7])
    cli_utils.use_config({}, ["zoo/solve_cartpole"])
    experiment = Experiment(
        run_name="run", ckpt_base_dir=folder, dataset=DiskTrajDataset(folder, "run", 5_000), max_seq_len=16, agent_type=Agent,
        tstep_encoder_type=FFTstepEncoder, traj_encoder_type=FFTrajEncoder, exploration_wrapper_type=EpsilonGreedy,
        make_train_env=make_env, make_val_env=make_env, val_timesteps_per_epoch=HORIZON + 1, val_episodes=EVALUATED, seed=seed,
        verbose=False, env_mode="async", ckpt_interval=None, parallel_actors=actors, env_workers=workers, epochs=epochs,
        train_batches_per_epoch=batches, val_interval=2,
    )  # fmt: skip
    experiment.start()
    experiment.learn()
    experiment.close()


if __name__ == "__main__":
    main()
