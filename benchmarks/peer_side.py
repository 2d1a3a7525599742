"""The script that `benchmarks.peer` runs in another interpreter, on another implementation of the interface.

It imports nothing from this repository: ``import amago`` imports the first such package on PYTHONPATH. It uses public
interfaces only: `Experiment`, gin bindings, `AMAGOEnv`, and the policy's `get_actions`. It reads JSON lines from standard
input: first the case, then one line per requested figure. It exits at the end of its input.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    sys.path[:] = [p for p in sys.path if os.path.abspath(p) != os.path.dirname(os.path.abspath(__file__))]

    def answer(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        case = json.loads(sys.stdin.readline())
        import torch

        torch.set_num_threads(case["threads"])
        with tempfile.TemporaryDirectory() as folder:
            CASES[case["benchmark"]](case, folder, answer)
    except BaseException:
        answer(error=traceback.format_exc())
        return 1
    return 0


def serve(answer: Callable[..., None], measure: Callable[[], float]) -> None:
    """Answer every line of standard input with a figure."""
    measure()  # warm-up
    answer(ready=True)
    for _ in iter(sys.stdin.readline, ""):
        answer(figure=measure())


# ---- environments -----------------------------------------------------------------------------------------------------------


def make_env(case: dict[str, Any]) -> Any:
    """The environment of the case, as an `AMAGOEnv`."""
    import gymnasium as gym
    import numpy as np

    from amago.envs import AMAGOEnv

    class Noise(gym.Env):  # type: ignore[type-arg]
        """Returns stored random observations; all rollouts have the same length."""

        def __init__(self, shape: tuple[int, ...], action_space: Any, episode: int) -> None:
            image = len(shape) == 3
            low, high, dtype = (0, 255, np.uint8) if image else (-np.inf, np.inf, np.float32)
            self.observation_space = gym.spaces.Box(low, high, shape, dtype)  # type: ignore[arg-type]
            self.action_space, self._episode, self._t = action_space, episode, 0
            rng = np.random.default_rng(0)
            self._bank = (
                rng.integers(0, 256, (16, *shape), dtype=np.uint8) if image else rng.random((16, *shape), dtype=np.float32)
            )

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            self._t = 0
            return self._bank[0], {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self._t += 1
            return self._bank[self._t % 16], float(self._t % 3), self._t == self._episode, False, {}

    if case["env"] == "CartPole":
        return AMAGOEnv(gym.make("CartPole-v1"), env_name="CartPole")
    if "choices" in case:
        space: Any = gym.spaces.Discrete(case["choices"])
    else:
        space = gym.spaces.Box(-1.0, 1.0, (case["action_width"],), np.float32)
    return AMAGOEnv(Noise(tuple(case["obs_shape"]), space, case["episode"]), env_name="Noise")


def start(case: dict[str, Any], folder: str, experiment_type: Any = None, **fields: Any) -> Any:
    """The `Experiment` of the case, started."""
    from functools import partial

    import amago
    from amago import cli_utils
    from amago.loading import DiskTrajDataset
    from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, TformerTrajEncoder
    from amago.nets.tstep_encoders import CNNTstepEncoder, FFTstepEncoder

    traj = {"FF": FFTrajEncoder, "GRU": GRUTrajEncoder, "Transformer": TformerTrajEncoder}[case["traj"]]
    cli_utils.use_config(dict(case["bindings"]))
    settings: dict[str, Any] = {
        "run_name": "peer", "ckpt_base_dir": folder, "max_seq_len": case["context"],
        "dataset": DiskTrajDataset(dset_root=folder, dset_name="peer", dset_max_size=100_000),
        "tstep_encoder_type": FFTstepEncoder if len(case["obs_shape"]) == 1 else CNNTstepEncoder, "traj_encoder_type": traj,
        "agent_type": getattr(amago.agent, case.get("agent", "Agent")), "make_train_env": partial(make_env, case),
        "make_val_env": partial(make_env, case), "parallel_actors": case["actors"], "env_mode": case.get("mode", "sync"),
        "val_timesteps_per_epoch": 10, "val_interval": None, "ckpt_interval": None, "always_save_latest": False, "verbose": False,
        "dloader_workers": 0, "epochs": 1_000_000, "log_to_wandb": False,
    }  # fmt: skip
    experiment = (experiment_type or amago.Experiment)(**settings | fields)
    experiment.start()
    return experiment


# ---- what is measured -------------------------------------------------------------------------------------------------------


def policy_step(case: dict[str, Any], folder: str, answer: Callable[..., None]) -> None:
    """Milliseconds of `get_actions` for actors whose rollouts last ``episode`` steps and began at different times."""
    import numpy as np
    import torch

    experiment = start(case, folder)
    policy, actors, episode = experiment.policy, case["actors"], case["episode"]
    policy.eval()
    encoder, device = policy.traj_encoder, experiment.DEVICE
    memory = encoder.init_hidden_state(actors, device)
    width = make_env(case).rl2_space.shape[0] if "rl2_width" not in case else case["rl2_width"]
    flat = {"observation": torch.randn(actors, *case["obs_shape"], device=device)}, torch.zeros(actors, width, device=device)
    times = np.arange(actors) % episode
    nested = False  # whether this implementation's arguments have a dimension of time

    def step() -> None:
        nonlocal memory
        if (ended := times >= episode).any():
            times[ended] = 0
            memory = encoder.reset_hidden_state(memory, ended)
        obs, rl2s, idxs = flat[0], flat[1], torch.from_numpy(times[:, None].copy()).to(device)
        if nested:
            obs, rl2s, idxs = {k: v.unsqueeze(1) for k, v in obs.items()}, rl2s.unsqueeze(1), idxs.unsqueeze(1)
        _, memory = policy.get_actions(obs=obs, rl2s=rl2s, time_idxs=idxs, hidden_state=memory, sample=True)
        times.__iadd__(1)

    def measure() -> float:
        done, begin = 0, time.perf_counter()
        with torch.inference_mode():
            while not done or time.perf_counter() - begin < case["seconds"]:
                step()
                done += 1
        return 1e3 * (time.perf_counter() - begin) / done

    try:
        measure()
    except (ValueError, RuntimeError, AssertionError, IndexError):
        nested, memory = True, encoder.init_hidden_state(actors, device)
    serve(answer, measure)


def rollout(case: dict[str, Any], folder: str, answer: Callable[..., None]) -> None:
    """Environment steps per second while `learn` collects training data, including exploration and recording."""
    import amago

    class Collecting(amago.Experiment):  # type: ignore[misc]
        def collect_new_training_data(self) -> None:
            self.train_timesteps_per_epoch = steps["a phase"]
            begin = time.perf_counter()
            super().collect_new_training_data()
            taken = time.perf_counter() - begin
            speed = steps["a phase"] * case["actors"] / taken
            steps["phases"] += 1
            steps["a phase"] = max(4, round(speed * case["seconds"] / case["actors"]))
            if steps["phases"] == 1:  # the warm-up, which determines the number of steps of later phases
                return
            answer(**({"ready": True} if steps["phases"] == 2 else {"figure": speed}))
            if not sys.stdin.readline():
                raise SystemExit(0)

    steps = {"a phase": 4, "phases": 0}
    experiment = start(case, folder, Collecting, start_learning_at_epoch=1_000_000, train_timesteps_per_epoch=4)
    _learn_until_exit(experiment)


def learner(case: dict[str, Any], folder: str, answer: Callable[..., None]) -> None:
    """Seconds of an update, measured within `learn`."""
    import amago

    class Learning(amago.Experiment):  # type: ignore[misc]
        def train_step(self, batch: Any, log_step: bool) -> Any:
            def measure() -> float:
                done, begin = 0, time.perf_counter()
                while not done or time.perf_counter() - begin < case["seconds"]:
                    super(Learning, self).train_step(batch, False)
                    done += 1
                return (time.perf_counter() - begin) / done

            serve(answer, measure)
            raise SystemExit(0)

    steps = (2 * case["batch"] // case["actors"] + 2) * case["episode"]
    fields = {"batch_size": case["batch"], "train_timesteps_per_epoch": steps, "train_batches_per_epoch": 1_000}
    experiment = start(case, folder, Learning, mixed_precision="bf16" if case.get("bf16") else "no", **fields)
    _learn_until_exit(experiment)


def _learn_until_exit(experiment: Any) -> None:
    try:
        experiment.learn()
    except SystemExit as err:
        if err.code:
            raise


CASES = {"policy_step": policy_step, "rollout": rollout, "learner": learner}

if __name__ == "__main__":
    sys.exit(main())
