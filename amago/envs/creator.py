"""`EnvCreator`: makes an environment with exploration and recording around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from amago.envs.sequence_wrapper import SequenceWrapper
from amago.envs.wrapper import innermost


class EnvCreator:
    """A function without arguments that makes an environment, wraps it in exploration, and records it (`SequenceWrapper`).

    Args:
        make_env: returns an `AMAGOEnv`.
        exploration_wrapper_type: a subclass of `ExplorationWrapper`; None: no exploration.
        save_trajs_to: directory of the trajectories; None: nothing is recorded.
        save_every_low, save_every_high: a piece ends after more than a number of steps drawn from [low, high); None: whole rollouts.
        save_trajs_as: "npz", "npz-compressed" or "segments".

    Attributes:
        rl2_space: that of the environment that was made last; None before.
        already_vectorized: whether it has several rows; None before.

    Raises:
        ValueError: only one of ``save_every_low`` and ``save_every_high`` is None.
    """

    def __init__(
        self,
        make_env: Callable[[], Any],
        exploration_wrapper_type: Callable[[Any], Any] | None = None,
        save_trajs_to: str | Path | None = None,
        save_every_low: int | None = None,
        save_every_high: int | None = None,
        save_trajs_as: str = "npz",
    ):
        if (save_every_low is None) != (save_every_high is None):
            raise ValueError(
                f"save_every_low is {save_every_low} and save_every_high is {save_every_high}: give both, or neither for whole rollouts"
            )
        self.make_env, self.exploration_wrapper_type = make_env, exploration_wrapper_type
        self.save_trajs_to, self.save_trajs_as = save_trajs_to, save_trajs_as
        self.save_every_low, self.save_every_high = save_every_low, save_every_high
        self.rl2_space: Any = None
        self.already_vectorized: bool | None = None

    @property
    def save_every(self) -> tuple[int, int] | None:
        if self.save_every_low is None or self.save_every_high is None:
            return None
        return self.save_every_low, self.save_every_high

    def __call__(self) -> SequenceWrapper:
        """Make the environment.

        Raises:
            TypeError: ``make_env`` did not return an `AMAGOEnv`.
        """
        env = self.make_env()
        innermost(env, "make_env must return an AMAGOEnv, but returned")
        if self.exploration_wrapper_type is not None:
            env = self.exploration_wrapper_type(env)
        made = SequenceWrapper(env, self.save_trajs_to, self.save_every, self.save_trajs_as)
        self.rl2_space, self.already_vectorized = made.rl2_space, made.already_vectorized
        return made
