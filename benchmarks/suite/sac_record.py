"""What SAC meets until it is half good: D4RL's "medium-replay" (Fu et al. 2020, arXiv 2004.07219), made anew and smaller.

    python -m benchmarks.suite.sac_record Hopper-v5 recorded/hopper-medium-replay.hdf5 --until 1065

Needs ``amago[mujoco,offline]`` and stable-baselines3, whose SAC has its defaults. 1,065 is a third of the way from random actions to D4RL's expert.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

LAST = 10  # rollouts, whose mean return ends a record
FIELDS = ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations")


class Recorder(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps every transition, as `FIELDS`, and the return of every rollout."""

    def __init__(self, env: gym.Env[Any, Any]):
        super().__init__(env)
        self.rows: list[tuple[Any, ...]] = []
        self.returns: list[float] = []

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._obs, info = self.env.reset(**kwargs)
        self._total = 0.0
        return self._obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        after, reward, terminated, truncated, info = self.env.step(action)
        self.rows.append((self._obs, np.array(action), reward, terminated, truncated, after))
        self._obs, self._total = after, self._total + float(reward)
        if terminated or truncated:
            self.returns.append(self._total)
        return after, reward, terminated, truncated, info

    def last(self) -> float:
        return float(np.mean(self.returns[-LAST:])) if self.returns else -np.inf

    def write(self, path: Path) -> None:
        import h5py

        path.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(path, "w") as file:
            for name, column in zip(FIELDS, zip(*self.rows, strict=True), strict=True):
                file[name] = np.array(column)


def record(env_id: str, path: Path, until: float, most: int, seed: int = 0) -> None:
    """Train SAC until the last rollouts return ``until`` on average, or for ``most`` steps, or until Ctrl-C, and write what it met as a file
    of D4RL."""
    from stable_baselines3 import SAC
    from stable_baselines3.common.callbacks import BaseCallback

    env = Recorder(gym.make(env_id))

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps % 5_000 == 0:
                print(f"{self.num_timesteps:,} steps, return {env.last():.0f}", flush=True)
            return env.last() < until and self.num_timesteps < most

    with suppress(KeyboardInterrupt):  # what there is is written
        SAC("MlpPolicy", env, seed=seed, device="cpu").learn(10**9, callback=Watch())
    env.write(path)
    mean = np.mean(env.returns) if env.returns else np.nan
    print(f"{path}: {len(env.rows):,} steps, {len(env.returns):,} rollouts, return {mean:.0f}, at the end {env.last():.0f}")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("env")
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--until", type=float, required=True, help=f"mean return of the last {LAST} rollouts that ends the record"
    )
    parser.add_argument("--steps", type=int, default=1_000_000, help="at most (default: %(default)s)")
    args = parser.parse_args()
    record(args.env, args.file, args.until, args.steps)
