"""The reference tasks of the suite: small enough for one core, and each fails for another reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
from support.point_robot import PointRobot

from amago.envs.builtin.tmaze import TMazeExploration, TMazePassive
from amago.envs.builtin.toy_gym import MetaFrozenLake, RoomKeyDoor
from amago.envs.exploration import BilevelEpsilonGreedy, EpsilonGreedy
from amago.nets.traj_encoders import GRUTrajEncoder, TformerTrajEncoder
from benchmarks.suite.envs import autoencode26, bandit5, cartpole_positions, lake3, recall8


@dataclass(frozen=True)
class Task:
    """A task, and how it is judged.

    Attributes:
        name: short name, unique.
        what: one line for tables.
        make: function that makes the environment.
        low, high: the mean return of random actions (measured, 500 rollouts), and a return near the best possible; scores are
            scaled such that these are 0 and 1.
        threshold: the mean return that counts as learned.
        horizon: maximum steps per rollout.
        context: maximum length of training sequences and of the policy's memory.
        cpu_seconds: budget of a run, in processor time of one thread.
        zoo: settings of the "tuned" configuration.
        tuned: bindings on top of them.
        rollouts: minimum rollouts per evaluation.
        buffer: maximum rollouts in the replay buffer.
        traj_encoder, exploration: classes of the "tuned" configuration.
    """

    name: str
    what: str
    make: Callable[[], gym.Env[Any, Any]]
    low: float
    high: float
    threshold: float
    horizon: int
    context: int
    cpu_seconds: int
    zoo: str
    tuned: Mapping[str, Any] = field(default_factory=dict)
    rollouts: int = 64
    buffer: int = 10_000
    traj_encoder: type = TformerTrajEncoder
    exploration: type = EpsilonGreedy

    def scaled(self, score: float) -> float:
        """A return on the scale where random actions have 0 and ``high`` has 1."""
        return (score - self.low) / (self.high - self.low)


_SMALL = {
    "Actor.d_hidden": 128, "NCritics.d_hidden": 128, "FFTstepEncoder.n_layers": 1, "FFTstepEncoder.d_hidden": 128,
    "FFTstepEncoder.d_output": 64, "TformerTrajEncoder.d_model": 64, "TformerTrajEncoder.d_ff": 256, "TformerTrajEncoder.n_layers": 2,
    "TformerTrajEncoder.n_heads": 4, "Agent.num_critics": 2, "Experiment.lr_warmup_steps": 100, "Experiment.sample_actions": False,
}  # fmt: skip


def _loop(actors: int, steps: int, batches: int, every: int, batch_size: int, rate: float) -> dict[str, Any]:
    return {
        "Experiment.parallel_actors": actors, "Experiment.train_timesteps_per_epoch": steps,
        "Experiment.train_batches_per_epoch": batches, "Experiment.val_interval": every, "Experiment.batch_size": batch_size,
        "Experiment.learning_rate": rate,
    }  # fmt: skip


_GRU = {"GRUTrajEncoder.d_hidden": 64, "GRUTrajEncoder.d_output": 64, "GRUTrajEncoder.n_layers": 1}
_BALANCE = {"FFTstepEncoder.d_output": 64, "Experiment.sample_actions": False}

TASKS = (
    Task(
        "lake3", "Meta-FrozenLake 3x3, 6 attempts", lake3,
        0.4, 5.6, 5.0, 54, 54, 300, "solve_lake", rollouts=256, exploration=BilevelEpsilonGreedy,
    ),
    Task(
        "lake5", "Meta-FrozenLake 5x5, 8 attempts", lambda: MetaFrozenLake(size=5, k_episodes=8, max_episode_steps=25),
        0.07, 7.0, 4.0, 200, 200, 1200, "solve_lake", {"BilevelEpsilonGreedy.rollout_horizon": 200, "BilevelEpsilonGreedy.steps_anneal": 6000,
        "Agent.gamma": 0.97, "Experiment.train_timesteps_per_epoch": 200}, rollouts=128, exploration=BilevelEpsilonGreedy,
    ),
    Task(
        "room5", "RoomKeyDoor 5x5, 25 of 125 steps", lambda: RoomKeyDoor(size=5, max_episode_steps=25, meta_rollout_horizon=125),
        2.1, 12.0, 5.0, 125, 125, 600, "solve_room", {"BilevelEpsilonGreedy.rollout_horizon": 125,
        "Experiment.train_timesteps_per_epoch": 125}, rollouts=128, exploration=BilevelEpsilonGreedy,
    ),
    Task(
        "tmaze100", "passive T-Maze, 100 steps", lambda: TMazePassive(99),
        -0.74, 1.0, 0.95, 100, 100, 300, "solve_tmaze", {"TMazeExploration.horizon": 100}, exploration=TMazeExploration, buffer=5_000,
    ),
    Task(
        "tmaze300", "passive T-Maze, 300 steps", lambda: TMazePassive(299),
        -0.75, 1.0, 0.95, 300, 300, 900, "solve_tmaze", {**_GRU, "TMazeExploration.horizon": 300, "Experiment.train_timesteps_per_epoch": 300,
        "Discrete.clip_prob_high": 1 - 1 / 300, "Discrete.clip_prob_low": 1 / 3000},
        exploration=TMazeExploration, buffer=5_000, traj_encoder=GRUTrajEncoder,
    ),
    Task("recall8", "name the suit shown 8 cards ago", recall8, -0.5, 1.0, 0.9, 51, 51, 400, "solve_recall"),
    Task(
        "autoencode", "repeat 26 cards in reverse order", autoencode26, -0.5, 1.0, 0.8, 52, 52, 600, "solve_recall",
    ),
    Task(
        "poles", "CartPole-v1 without velocities", cartpole_positions,
        22.0, 500.0, 450.0, 500, 16, 600, "solve_cartpole", {**_BALANCE, **_GRU, "Experiment.lr_cooldown": 0.0,
        "Experiment.learning_rate": 2e-4, "Experiment.ema_decay": 0.99}, rollouts=32, buffer=5_000, traj_encoder=GRUTrajEncoder,
    ),
    Task(
        "robot", "PointRobot, 3 attempts, final rewards", lambda: PointRobot(k_episodes=3, rewards="final"),
        -3.1, -1.2, -2.0, 62, 62, 900, "point_robot", {**_SMALL, "Agent.tau": 0.02, "Multigammas.continuous": [0.8],
        **_loop(32, 62, 50, 4, 24, 1e-3), "Experiment.lr_cooldown": 0.0}, rollouts=128,
    ),
    Task(
        "bandit", "Bernoulli bandit, 5 arms, 50 pulls", bandit5,
        25.5, 38.0, 35.0, 50, 50, 300, "solve_recall", {"Agent.gamma": 0.95, "Multigammas.discrete": [0.7]}, rollouts=256,
    ),
)  # fmt: skip
NAMES = tuple(task.name for task in TASKS)
SHARED = _loop(24, 0, 50, 4, 24, 1e-4)
"""The loop of the "default" configuration; its collection phase is one rollout."""


def bindings(task: Task, base: str) -> tuple[dict[str, Any], list[str]]:
    """The bindings and the settings files of a base configuration, "tuned" or "default"."""
    if base == "tuned":
        return dict(task.tuned), [f"zoo/{task.zoo}"]
    return SHARED | {"Experiment.train_timesteps_per_epoch": task.horizon}, []


def classes(task: Task, base: str) -> tuple[type, type]:
    """The sequence model and the exploration of a base configuration."""
    if base == "tuned":
        return task.traj_encoder, task.exploration
    return TformerTrajEncoder, EpsilonGreedy
