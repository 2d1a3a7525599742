"""Meta-World: robotic manipulation with hidden goals, and k attempts per task (Yu et al. 2019, arXiv:1910.10897)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.envs.builtin._common import Attempts
from amago.registry import require

Observation = NDArray[np.float32]

SPLITS = ("train", "test")
SUITES = ("ML10", "ML25", "ML45")
LONGEST = 500
"""Maximum steps of an episode in Meta-World."""

_idle: dict[type, list[Any]] = {}  # simulators that no rollout of this process uses, by class; they are slow to make


@dataclass(frozen=True)
class MetaWorldTasks:
    """The tasks of a benchmark in both splits, made by `metaworld_tasks`. Picklable; all environments can share one.

    Attributes:
        benchmark: name of the benchmark or of its only task.
        classes: split -> name of a task -> Meta-World's class of its simulator.
        tasks: split -> name of a task -> 50 tasks of Meta-World, which differ in their goals.
    """

    benchmark: str
    classes: dict[str, dict[str, type]] = field(repr=False)
    tasks: dict[str, dict[str, list[Any]]] = field(repr=False)

    def names(self, split: str) -> list[str]:
        return sorted(self.tasks[split])


def metaworld_tasks(benchmark: str, seed: int | None = 0) -> MetaWorldTasks:
    """Draw 50 goals for each task of a benchmark. This takes seconds for one task, and much longer for ML45.

    Args:
        benchmark: "ML10", "ML25" or "ML45" (in any case), or the name of one task such as "reach-v3", for ML1: the splits
            differ in goals. Names that end in -v1 or -v2 mean version 3, with a warning.
        seed: determines the goals; None draws different goals at each call.
    """
    metaworld = require("metaworld", "metaworld")
    known = list(metaworld.ALL_V3_ENVIRONMENTS)
    name = str(benchmark)
    if name.upper() in SUITES:
        name = name.upper()
        drawn = vars(metaworld)[name](seed=seed)
    else:
        base, _, version = name.rpartition("-")
        if version in ("v1", "v2") and f"{base}-v3" in known:
            warnings.warn(f"Meta-World has no {name} any more: using {base}-v3, whose returns differ", stacklevel=2)
            name = f"{base}-v3"
        if name not in known:
            raise ValueError(f"benchmark must be one of {', '.join(SUITES)} or of {', '.join(known)}; got {benchmark!r}")
        drawn = metaworld.ML1(name, seed=seed)
    classes = {"train": dict(drawn.train_classes), "test": dict(drawn.test_classes)}
    tasks: dict[str, dict[str, list[Any]]] = {split: {} for split in SPLITS}
    for split, rows in (("train", drawn.train_tasks), ("test", drawn.test_tasks)):
        for task in rows:
            tasks[split].setdefault(task.env_name, []).append(task)
    return MetaWorldTasks(name, classes, tasks)


@gin.configurable(module="amago.envs.builtin")
class MetaWorld(gym.Env[Observation, NDArray[np.float32]]):
    """k attempts at one task of Meta-World with a hidden goal; each rollout draws another task and goal.

    A rollout draws a task of the split (uniformly), then one of its 50 goals. An attempt lasts ``episode_length`` steps,
    whether or not it succeeds; its last step returns the first observation of the next attempt. The rollout terminates (never
    truncates) with the last attempt. The environments of a process share idle simulators.

    Reward: Meta-World's, 0 to 10 per step.

    Actions, ``Box(-1, 1, (4,))``: motion of the hand along x, y and z, and the gripper.

    Observation, float32 ``(41,)``: Meta-World's 39 numbers with the goal replaced by zeros, steps of this attempt divided by
    ``episode_length``, finished attempts divided by ``k_episodes``. The space is unbounded, because Meta-World's observations
    leave the bounds that it declares.

    Metrics at the end of attempt i (from 0): ``Attempt {i} Success``, 1 if any of its steps solved the task, and
    ``Attempt {i} Return``; at the end of the rollout ``Success Rate``, the mean over attempts. `env_name` separates them by
    task.

    Args:
        tasks: the result of `metaworld_tasks`.
        split: "train" or "test".
        k_episodes: attempts per rollout.
        episode_length: steps per attempt, at most 500.
        task: name of the only task to draw; None means all tasks of the split.
    """

    def __init__(
        self,
        tasks: MetaWorldTasks,
        split: str = "train",
        k_episodes: int = 1,
        episode_length: int = LONGEST,
        task: str | None = None,
    ) -> None:
        if not isinstance(tasks, MetaWorldTasks):
            raise TypeError(f"tasks must come from metaworld_tasks(), got {tasks!r}")
        self.tasks, self.split = tasks, common.check_choice("split", split, SPLITS)
        self.k_episodes = common.check_int("k_episodes", k_episodes, 1)
        self.episode_length = common.check_int("episode_length", episode_length, 1)
        if self.episode_length > LONGEST:
            raise ValueError(
                f"episode_length must be at most {LONGEST}, the longest episode of Meta-World, got {episode_length!r}"
            )
        if task is not None and task not in tasks.tasks[split]:
            raise ValueError(f"task must be None or one of {', '.join(tasks.names(split))}, got {task!r}")
        self._names = tasks.names(split) if task is None else [task]
        self.horizon = self.k_episodes * self.episode_length
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, shape=(41,), dtype=np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, shape=(4,), dtype=np.float32)
        self._name = self._names[0]
        self._simulator: Any = None
        self._attempts = Attempts(self.k_episodes, self.episode_length, mean=("Success", "Success Rate"))
        self._success = 0.0

    @property
    def env_name(self) -> str:
        return self._name if self.split == "train" else f"{self._name}-test"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self._name = self._names[int(self.np_random.integers(len(self._names)))]
        goals = self.tasks.tasks[self.split][self._name]
        task = goals[int(self.np_random.integers(len(goals)))]
        self.close()
        simulator = self.tasks.classes[self.split][self._name]
        idle = _idle.get(simulator)
        self._simulator = idle.pop() if idle else simulator()
        self._simulator.set_task(task)
        self._attempts.begin_rollout()
        return self._begin_attempt(), {}

    def _begin_attempt(self) -> Observation:
        self._attempts.begin()
        self._success = 0.0
        obs, _ = self._simulator.reset()
        return self._observe(obs)

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if not self._attempts.under_way or self._simulator is None:
            common.refuse_step("MetaWorld")
        motion = common.check_continuous_action(action, 4).astype(np.float32)
        raw, raw_reward, _, _, raw_info = self._simulator.step(motion)
        reward = float(raw_reward)
        self._success = max(self._success, float(raw_info["success"]))
        if not self._attempts.step(reward):
            return self._observe(raw), reward, False, False, {}
        info = self._attempts.end({"Success": self._success})
        terminated = not self._attempts.under_way
        return self._observe(raw) if terminated else self._begin_attempt(), reward, terminated, False, info

    def _observe(self, raw: NDArray[np.float64]) -> Observation:
        return np.concatenate((raw, self._attempts.progress), dtype=np.float32)

    def close(self) -> None:
        """Release the simulator; `reset` acquires one again."""
        simulator, self._simulator = self._simulator, None
        if simulator is not None:
            _idle.setdefault(type(simulator), []).append(simulator)


class Metaworld(MetaWorld):
    """`MetaWorld` with ``metaworld_tasks(benchmark_name, seed)``."""

    def __init__(
        self,
        benchmark_name: str,
        split: str = "train",
        k_episodes: int = 1,
        episode_length: int = LONGEST,
        seed: int | None = 0,
    ) -> None:
        name = benchmark_name.upper() if benchmark_name.lower().startswith("ml") else benchmark_name
        super().__init__(metaworld_tasks(name, seed), split, k_episodes, episode_length)
