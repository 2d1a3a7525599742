"""RecurrentPPO of sb3-contrib on the tasks of the suite, with the same processor time and the same judge, for `benchmarks.suite table`.

    pip install sb3-contrib==2.9.2
    python -m benchmarks.suite.recurrent_ppo run --tasks lake3 tmaze100 recall8 poles robot bandit --seeds 2 --jobs 2
    python -m benchmarks.suite.recurrent_ppo search --tasks lake3 tmaze100 recall8 poles robot bandit
    python -m benchmarks.suite.recurrent_ppo run --searched
    python -m benchmarks.suite table --config tuned --against recurrent_ppo

Observations are those that our agents get: the task's, the last action, the last reward, and whether the rollout begins. "search" tries each
of `CANDIDATES` with a third of the budget and another seed, and "--searched" trains with the best of each task. Nothing is resumed.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import machine
from benchmarks.suite.recorded import Point, append, claimed, in_processes, is_done, points
from benchmarks.suite.runs import result_path
from benchmarks.suite.statistics import final_score
from benchmarks.suite.tasks import NAMES, TASKS, Task

RESULTS = Path(__file__).parents[1] / "results" / "suite"
EVALUATIONS = 16  # in a budget
SEARCH_SEED, SEARCH_SHARE = 100, 1 / 3
CANDIDATES: dict[str, dict[str, Any]] = {
    "default": {},
    "fast": {"learning_rate": 1e-3},
    "curious": {"ent_coef": 0.02},
    "whole": {"n_steps": "horizon", "n_envs": 16, "batch_size": 512, "learning_rate": 1e-3, "ent_coef": 0.01},
    "short": {"n_envs": 16, "batch_size": 512, "learning_rate": 1e-3, "gamma": 0.95, "ent_coef": 0.01},
    "many": {"n_envs": 32, "n_steps": "horizon", "batch_size": 1024, "n_epochs": 5, "learning_rate": 1e-3, "gae_lambda": 0.9},
}
"""Settings of RecurrentPPO beside its defaults; "n_envs" (8) are environments, and "horizon" is the task's."""


class Remembered(gym.Wrapper[Any, Any, Any, Any]):
    """Observations are flat, and followed by the last action, the last reward, and 1 at the start of a rollout."""

    def __init__(self, env: gym.Env[Any, Any]):
        super().__init__(env)
        self._size = gym.spaces.flatdim(env.action_space)
        size = gym.spaces.flatdim(env.observation_space) + self._size + 2
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)

    def _with(self, obs: Any, action: Any, reward: float, first: float) -> NDArray[np.float32]:
        flat = gym.spaces.flatten(self.env.observation_space, obs)
        last = np.zeros(self._size) if action is None else gym.spaces.flatten(self.env.action_space, action)
        return np.concatenate([np.ravel(flat), np.ravel(last), [reward, first]]).astype(np.float32)

    def reset(self, **kwargs: Any) -> Any:
        obs, info = self.env.reset(**kwargs)
        return self._with(obs, None, 0.0, 1.0), info

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._with(obs, action, float(reward), 0.0), float(reward), terminated, truncated, info


def train(task: Task, settings: dict[str, Any], seed: int, path: Path, budget: float) -> None:
    """Train for a budget of processor seconds, and write a row for each of the evaluations."""
    require()
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    settings = {k: task.horizon if v == "horizon" else v for k, v in settings.items()}
    actors = settings.pop("n_envs", 8)

    def make() -> gym.Env[Any, Any]:
        return Remembered(task.make())

    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"task": task.name, "seed": seed, "config": settings | {"n_envs": actors}, "budget": budget, "machine": machine()}
    path.write_text(json.dumps(head) + "\n")
    began = time.process_time()
    model = RecurrentPPO("MlpLstmPolicy", DummyVecEnv([make] * actors), seed=seed, device="cpu", **settings)
    judge = DummyVecEnv([make] * 32)
    judge.seed(10_000 + seed)
    per_epoch = -(-model.n_steps * actors // model.batch_size)
    until = 0.0
    while True:
        score = evaluate(model, judge, -(-task.rollouts // 32))
        cpu = time.process_time() - began
        append(path, asdict(Point(round(cpu, 2), int(model.num_timesteps), int(model._n_updates * per_epoch), score)))
        if cpu >= budget:
            break
        while until <= cpu:
            until += budget / EVALUATIONS
        model.learn(10**9, callback=_stop_after(began + until), reset_num_timesteps=False)
    append(path, {"done": True})


def require() -> None:
    """Raises ImportError with what to install, if RecurrentPPO is missing."""
    try:
        import sb3_contrib  # noqa: F401
    except ImportError as err:
        raise ImportError("RecurrentPPO needs sb3-contrib: pip install sb3-contrib==2.9.2") from err


def _stop_after(moment: float) -> Callable[[dict[str, Any], dict[str, Any]], bool]:
    """A callback that ends `learn` at the first step after ``moment`` at which a rollout of the algorithm begins."""

    def goes_on(local: dict[str, Any], _: dict[str, Any]) -> bool:
        return local.get("n_steps", 0) != 0 or time.process_time() < moment

    return goes_on


def evaluate(model: Any, envs: Any, episodes: int) -> float:
    """The mean return of most likely actions, over ``episodes`` of each environment."""
    obs, state = envs.reset(), None
    starts = np.ones(envs.num_envs, bool)
    totals, ended = np.zeros(envs.num_envs), np.zeros(envs.num_envs, int)
    returns: list[float] = []
    while (ended < episodes).any():
        actions, state = model.predict(obs, state=state, episode_start=starts, deterministic=True)
        obs, rewards, starts, _ = envs.step(actions)
        totals += rewards
        for i in np.flatnonzero(starts):
            if ended[i] < episodes:
                returns.append(float(totals[i]))
            ended[i] += 1
            totals[i] = 0.0
    return float(np.mean(returns))


# ---- the search ------------------------------------------------------------------------------------------------------------


def searched(results: Path, task: str) -> dict[str, Any]:
    """The candidate whose curve ended highest in the search.

    Raises:
        FileNotFoundError: the search is not done.
    """
    folder = results / "recurrent_ppo_search"
    found = {n: folder / n / task / f"seed{SEARCH_SEED}.jsonl" for n in CANDIDATES}
    missing = [name for name, path in found.items() if not is_done(path)]
    if missing:
        raise FileNotFoundError(f"the search for {task} has not tried {', '.join(missing)}: run search --tasks {task} first")
    return CANDIDATES[max(found, key=lambda n: final_score(points(found[n])))]


# ---- the command -----------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(
        prog="python -m benchmarks.suite.recurrent_ppo", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "command", choices=("run", "search", "one"), help="train, try candidates, or a single run in this process"
    )
    parser.add_argument("--tasks", nargs="+", choices=NAMES, default=list(NAMES), metavar="TASK", help=", ".join(NAMES))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results (default: benchmarks/results/suite)")
    parser.add_argument("--seeds", type=int, default=1, help="run: seeds 0 to N - 1; one: the seed")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--budget", type=float, default=None, help="processor seconds of each run, instead of the tasks'")
    parser.add_argument("--candidate", choices=sorted(CANDIDATES), default=None, help="one: train with this one")
    parser.add_argument("--searched", action="store_true", help="with the best candidate of the search, not the defaults")
    args = parser.parse_args(argv)
    if args.command == "one":
        _one(args)
        return 0
    require()
    if args.command == "search":
        tries = [(t, SEARCH_SEED, name) for t in args.tasks for name in CANDIDATES]
    else:
        tries = [(t, seed, "") for seed in range(args.seeds) for t in args.tasks]
    tries = [job for job in tries if not is_done(_path(args, *job))]
    return 0 if in_processes(tries, lambda job: _words(*job, args), args.jobs) else 1


def _path(args: Namespace, task: str, seed: int, candidate: str) -> Path:
    if candidate:
        return result_path(args.results / "recurrent_ppo_search", candidate, task, seed)
    return result_path(args.results, "recurrent_ppo_searched" if args.searched else "recurrent_ppo", task, seed)


def _words(task: str, seed: int, candidate: str, args: Namespace) -> list[str]:
    words = ["benchmarks.suite.recurrent_ppo", "one", "--tasks", task, "--seeds", str(seed), "--results", str(args.results)]
    words += ["--budget", str(args.budget)] if args.budget is not None else []
    return words + (["--candidate", candidate] if candidate else []) + (["--searched"] if args.searched else [])


def _one(args: Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    for task in (t for t in TASKS if t.name in args.tasks):
        budget = task.cpu_seconds if args.budget is None else args.budget
        settings = searched(args.results, task.name) if args.searched else CANDIDATES[args.candidate or "default"]
        share = SEARCH_SHARE if args.candidate else 1.0
        path = _path(args, task.name, args.seeds, args.candidate or "")
        with claimed(path):
            train(task, dict(settings), args.seeds, path, budget * share)


if __name__ == "__main__":
    sys.exit(main())
