"""`amago.envs.builtin.maze_runner` in the form that scripts for the original system import."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from amago.envs.amago_env import AMAGOEnv
from amago.envs.builtin.maze_runner import MazeRunner

__all__ = ["MazeRunnerAMAGOEnv", "MazeRunnerGymEnv"]


class MazeRunnerGymEnv(gym.ObservationWrapper[Any, Any, Any]):
    """`amago.envs.builtin.MazeRunner` whose observations are called "obs", "goals" and "achieved".

    Args:
        maze_dim: odd side length of the maze.
        num_goals: goals of each rollout.
        time_limit: steps of a rollout; None: the maze's default.
        randomized_action_space: permute the actions in each rollout.
    """

    def __init__(
        self, maze_dim: int = 15, num_goals: int = 3, time_limit: int | None = None, randomized_action_space: bool = False
    ) -> None:
        maze = MazeRunner(
            maze_dim, min_goals=num_goals, max_goals=num_goals, time_limit=time_limit, randomize_actions=randomized_action_space
        )
        super().__init__(maze)
        spaces: dict[str, gym.Space[Any]] = dict(maze.observation_space.items())  # type: ignore[attr-defined]
        self.observation_space = gym.spaces.Dict({_shown(key): space for key, space in spaces.items()})

    def observation(self, observation: Any) -> Any:
        return {_shown(key): value for key, value in observation.items()}


def _shown(key: str) -> str:
    return "obs" if key == "observation" else key


class MazeRunnerAMAGOEnv(AMAGOEnv):
    """`MazeRunnerGymEnv`, wrapped.

    Args:
        maze_dim, num_goals, time_limit, randomized_action_space: as of `MazeRunnerGymEnv`.
    """

    def __init__(
        self, maze_dim: int = 15, num_goals: int = 3, time_limit: int | None = None, randomized_action_space: bool = False
    ) -> None:
        env = MazeRunnerGymEnv(maze_dim, num_goals, time_limit, randomized_action_space)
        super().__init__(env, env_name=f"mazerunner_{maze_dim}_{num_goals}")
