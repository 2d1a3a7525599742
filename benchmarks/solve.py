"""Wall time until a task is solved, from scratch, with the settings of ``amago/zoo/solve_*.gin``.

A task is solved when two consecutive evaluations without exploration, each of at least `Task.rollouts` rollouts, reach its
score on average and the first of them reaches it alone. The second guards against scores that fluctuate. The time starts with
the construction of the experiment and includes collection, updates and all evaluations.

The "ceiling" is the time limit, 120 s, and the ratio is 120 s divided by the time taken. A run that has not reached the score
after 240 s ends with the note "not reached".
"""

from __future__ import annotations

import shutil
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym

from amago import cli_utils, config
from amago.agent import Agent
from amago.envs import AMAGOEnv
from amago.envs.builtin.tmaze import TMazeExploration, TMazePassive
from amago.envs.builtin.toy_gym import MetaFrozenLake, RoomKeyDoor
from amago.envs.exploration import BilevelEpsilonGreedy, EpsilonGreedy
from amago.experiment import Experiment
from amago.loading import DiskTrajDataset
from amago.nets.traj_encoders import FFTrajEncoder, TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from benchmarks.harness import Row
from benchmarks.recall import RepeatPrevious

ALLOWED = 120.0
RETURN = "Average Total Return (Across All Env Names)"


@dataclass(frozen=True)
class Task:
    """A task and the score that solves it.

    Attributes:
        name: name of the settings in the zoo.
        make: function that makes the environment.
        score: mean return per rollout that solves the task.
        horizon: maximum steps per rollout.
        rollouts: minimum number of rollouts per evaluation.
        memory: maximum length of training sequences, and of the policy's context.
        buffer: maximum number of rollouts in the replay buffer.
        traj_encoder, exploration: classes of the sequence model and of the exploration wrapper.
    """

    name: str
    make: Callable[[], gym.Env[Any, Any]]
    score: float
    horizon: int
    rollouts: int
    memory: int
    buffer: int
    traj_encoder: type = TformerTrajEncoder
    exploration: type = BilevelEpsilonGreedy


TASKS = (
    Task("cartpole", lambda: gym.make("CartPole-v1"), 475.0, 500, 32, 16, 5_000, FFTrajEncoder, EpsilonGreedy),
    Task("recall", RepeatPrevious, 0.96, 51, 64, 51, 10_000, exploration=EpsilonGreedy),
    Task("lake", lambda: MetaFrozenLake(size=3, k_episodes=6, max_episode_steps=9), 5.3, 54, 256, 54, 10_000),
    Task("room", lambda: RoomKeyDoor(size=4, max_episode_steps=20, meta_rollout_horizon=80), 5.0, 80, 128, 80, 10_000),
    Task("tmaze", lambda: TMazePassive(99), 1.0, 100, 64, 100, 5_000, exploration=TMazeExploration),
)
TITLES = {
    "cartpole": "CartPole-v1, return 475",
    "recall": "recall of 4 cards, return 0.96",
    "lake": "Meta-FrozenLake 3x3, k=6, return 5.3",
    "room": "RoomKeyDoor 4x4, 20 of 80 steps, return 5.0",
    "tmaze": "T-Maze 100, passive, return 1.0",
}


class Point(NamedTuple):
    """An evaluation: its wall time and processor time, the numbers of updates and steps until then, and its score."""

    seconds: float
    cpu: float
    updates: int
    steps: int
    score: float


class Solved(Exception):
    """Raised to end a run that is solved or out of time."""


class TimedExperiment(Experiment):
    """Records each evaluation in ``curve``, and raises `Solved` when the task is solved or ``limit`` seconds have passed."""

    score: float = float("inf")
    began: tuple[float, float] = (0.0, 0.0)
    limit: float = float("inf")
    aloud: bool = False
    curve: list[Point]
    _last: float | None = None

    def log(self, metrics_dict: Any, key: str) -> None:
        super().log(metrics_dict, key)
        if key == "val" and RETURN in metrics_dict:
            now = Point(
                time.monotonic() - self.began[0], time.process_time() - self.began[1], self.learner.grad_steps, self.env_steps,
                float(metrics_dict[RETURN]),
            )  # fmt: skip
            self.curve.append(now)
            if self.aloud:
                print("  {:6.1f} s {:6.1f} s of cpu {:6d} updates {:8d} steps {:8.3f}".format(*now), flush=True)
            if now.seconds > self.limit:
                raise Solved
            self._confirm(now)

    def _confirm(self, now: Point) -> None:
        """After an evaluation that reaches the score, evaluate again at once; raise `Solved` if their mean reaches it, too."""
        last, self._last = self._last, now.score if now.score >= self.score else None
        if last is not None and (last + now.score) / 2 >= self.score:
            raise Solved
        if last is None and self._last is not None:
            self.evaluate_val()


def build(task: Task, folder: Path, seed: int) -> TimedExperiment:
    """The experiment of a task, with the present gin bindings."""

    def make_env() -> AMAGOEnv:
        return AMAGOEnv(task.make(), env_name=task.name)

    experiment = TimedExperiment(
        run_name=task.name, ckpt_base_dir=str(folder), dataset=DiskTrajDataset(folder, task.name, task.buffer),
        max_seq_len=task.memory, tstep_encoder_type=FFTstepEncoder, traj_encoder_type=task.traj_encoder, agent_type=Agent,
        exploration_wrapper_type=task.exploration, make_train_env=make_env, make_val_env=make_env, val_timesteps_per_epoch=1,
        ckpt_interval=None, always_save_latest=False, save_trajs_as="segments", env_mode="sync", seed=seed, verbose=False,
    )  # fmt: skip
    experiment.val_timesteps_per_epoch = -(-task.rollouts // experiment.parallel_actors) * task.horizon + 1
    experiment.score = task.score
    return experiment


def attempt(
    task: Task, limit: float, seed: int = 0, settings: dict[str, Any] | None = None, aloud: bool = False
) -> list[Point]:
    """Train until the task is solved or ``limit`` seconds have passed; returns all evaluations."""
    folder, began = Path(tempfile.mkdtemp()), (time.monotonic(), time.process_time())
    try:
        with config.temporary({}):
            own = {"TMazeExploration.horizon": task.horizon} if task.exploration is TMazeExploration else {}
            cli_utils.use_config(own, [f"zoo/solve_{task.name}"])
            cli_utils.use_config(settings or {})
            experiment = build(task, folder, seed)
            experiment.began, experiment.limit, experiment.aloud, experiment.curve = began, limit, aloud, []
            experiment.start()
            try:
                experiment.learn()
                experiment.evaluate_val()
            except Solved:
                pass
            finally:
                experiment.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return experiment.curve


def rows(options: Namespace) -> Iterator[Row]:
    """One row per task, from a single run."""
    for task in TASKS:
        if options.only in TITLES[task.name] or options.only == task.name:
            yield _row(task, options)


def _row(task: Task, options: Namespace) -> Row:
    if options.smoke:
        tiny: dict[str, Any] = {"Experiment.epochs": 1, "Experiment.train_timesteps_per_epoch": task.horizon + 1}
        tiny |= {"Experiment.train_batches_per_epoch": 2, "Experiment.parallel_actors": 2, "Experiment.val_interval": None}
        curve = attempt(replace(task, rollouts=1), 0.0, 0, tiny)
    else:
        curve = attempt(task, 2 * ALLOWED)
    seconds, best = curve[-1].seconds, max(point.score for point in curve)
    solved = len(curve) > 1 and min(curve[-1].score, curve[-2].score) >= task.score
    note = "" if solved else f"not reached: {best:.4g} at best"
    details = {"best": best, **{k: float(v) for k, v in curve[-1]._asdict().items() if k != "score"}}
    return Row(TITLES[task.name], seconds, "s", ALLOWED, ALLOWED / seconds, 1.0, note=note, details=details)
