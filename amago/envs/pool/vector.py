"""A pool of actors with the methods of a Gymnasium vector environment, for programs that step by themselves."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.env_utils import infos_of_rows
from amago.envs.policy_actions import policy_space
from amago.envs.pool.base import ActorPool

Array = NDArray[Any]


class PoolEnv:
    """The environments of a pool, as one that steps them all: what `Experiment.train_envs` and `Experiment.val_envs` are.

    A rollout that ends is followed by a new one at once, whose first observation is returned.

    Args:
        pool: `reset` was called.

    Attributes:
        pool: the actors.
        num_envs: N.
    """

    def __init__(self, pool: ActorPool):
        self.pool, self.num_envs = pool, pool.num_actors

    @property
    def single_observation_space(self) -> gym.spaces.Dict:
        """Of each environment, flat."""
        return self.pool.observation_space

    @property
    def single_action_space(self) -> gym.Space[Any]:
        """Of each environment: what `Agent.get_actions` chooses from."""
        return policy_space(self.pool.action_spec)

    @property
    def rl2_space(self) -> gym.spaces.Dict:
        """Dict {"obs": the observation space, "rl2": Box of the reward and the previous action}."""
        return gym.spaces.Dict({"obs": self.pool.observation_space, "rl2": self.pool.rl2_space})

    @property
    def envs(self) -> list[Any]:
        """The environments, where they are in this process.

        Raises:
            AttributeError: they are in worker processes.
        """
        if not hasattr(self.pool, "envs"):
            raise AttributeError(
                "the environments are in worker processes: use call_async(name, *args) and call_wait(), or env_mode='sync'"
            )
        return list(self.pool.envs)

    def reset(self, **options: Any) -> tuple[dict[str, Array], dict[str, Any]]:
        """Begin a rollout in every environment.

        Args:
            options: ``seed`` and ``options`` have no effect: actors are seeded by the run.

        Returns:
            observations {key: (N, ...)}, and {}.
        """
        self.pool.reset()
        return self._observations(), {}

    def step(self, actions: Any) -> tuple[dict[str, Array], Array, Array, Array, dict[str, Any]]:
        """Take one step of every environment.

        Args:
            actions: N actions in the form that `Agent.get_actions` returns them; dimensions of length 1 may be left out, or be more.

        Returns:
            observations {key: (N, ...)}, rewards, terminated and truncated (N,), and the infos {key: (N,), _key: (N,)}. An environment
            that failed and was replaced has the reward 0 and is truncated.

        Raises:
            ValueError: there is another number of actions.
        """
        chosen = np.asarray(actions.cpu() if hasattr(actions, "cpu") else actions)
        wanted = (self.num_envs, self.pool.action_spec.stored_dim)
        if chosen.size != wanted[0] * wanted[1] or chosen.shape[:1] != wanted[:1]:
            raise ValueError(
                f"actions have shape {chosen.shape}, but there are {wanted[0]} environments with actions of {wanted[1]} numbers"
            )
        self.pool.step(chosen.reshape(wanted))
        outcomes = self.pool.call("outcome")
        if len(outcomes) != self.num_envs:  # the rows of one environment
            rewards, terminated, truncated, info = outcomes[0] or _lost(self.num_envs)
            return self._observations(), np.array(rewards, np.float32), np.array(terminated), np.array(truncated), dict(info)
        parts: list[Any] = [_lost(1) if out is None else out for out in outcomes]
        rewards, terminated, truncated = (
            np.concatenate([np.ravel(p[i]) for p in parts]).astype(d) for i, d in enumerate((np.float32, bool, bool))
        )
        return self._observations(), rewards, terminated, truncated, infos_of_rows([p[3] for p in parts])

    def _observations(self) -> dict[str, Array]:
        return {key: array.copy() for key, array in self.pool.obs.items()}

    def call_async(self, name: str, *args: Any, **kwargs: Any) -> None:
        """See `ActorPool.call_async`."""
        self.pool.call_async(name, *args, **kwargs)

    def call_wait(self) -> list[Any]:
        """See `ActorPool.call_wait`."""
        return self.pool.call_wait()

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`call_async`, then `call_wait`."""
        return self.pool.call(name, *args, **kwargs)

    def render(self) -> Any:
        """Render the first environment."""
        return self.pool.render()

    def close(self) -> None:
        """End every environment."""
        self.pool.close()


def _lost(rows: int) -> tuple[Array, Array, Array, dict[str, Any]]:
    """The outcome of a step in which an environment failed."""
    return np.zeros(rows, np.float32), np.zeros(rows, bool), np.ones(rows, bool), {}
