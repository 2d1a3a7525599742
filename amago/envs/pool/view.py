"""What callers of a pool see of its environments: attributes by name, and the state of their rollouts."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from amago.data.timesteps import PolicyInput
from amago.envs.pool.faults import ActorError
from amago.envs.statistics import ReturnHistory, SpecialMetricHistory

if TYPE_CHECKING:
    from amago.envs.pool.actor import Actor


class ActorView:
    """An actor's environment, with what `amago.envs.SequenceWrapper` knows of its rollouts; other attributes are the environment's.

    Attributes:
        env: with all its wrappers.
    """

    def __init__(self, actor: Actor):
        self._actor, self.env = actor, actor.env

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.env, name)

    @property
    def unwrapped(self) -> Any:
        """The environment without wrappers."""
        return self.env.unwrapped

    @property
    def rl2_space(self) -> gym.spaces.Dict:
        """Dict {"obs": the observation space, "rl2": Box of the reward and the previous action}."""
        return gym.spaces.Dict({"obs": self._actor.base.observation_space, "rl2": self._actor.base.rl2_space})

    @property
    def current_timestep(self) -> PolicyInput:
        """What a policy takes now: observations {key: (B, ...)}, rl2 (B, 1 + A) and time indices (B, 1), zero where a rollout opens."""
        buffers, rows = self._actor.buffers, self._actor.rows
        obs = {key: array[rows].copy() for key, array in buffers.obs.items()}
        return obs, buffers.rl2s[rows].copy(), buffers.time_idxs[rows].copy()

    @property
    def outcome(self) -> tuple[Any, Any, Any, dict[str, Any]] | None:
        """(reward, terminated, truncated, info) of the last step; None before the first of a new environment."""
        return self._actor.outcome  # type: ignore[return-value]

    @property
    def return_history(self) -> ReturnHistory:
        """Returns of the rollouts that have ended since the pool's last `drain`, or `reset_stats`."""
        return ReturnHistory.of(self._actor.recorder.counts.episodes)

    @property
    def special_history(self) -> SpecialMetricHistory:
        """What the environment has logged in these rollouts."""
        return SpecialMetricHistory.of(self._actor.recorder.counts.episodes)

    def reset_stats(self) -> None:
        """Forget the rollouts that have ended."""
        self._actor.recorder.counts.forget_episodes()

    @property
    def total_frames_by_env_name(self) -> dict[str, int]:
        """Steps by environment name, ever."""
        counts = self._actor.recorder.counts
        counts.count_frames(range(self._actor.base.batched_envs))
        return dict(counts.total_frames)

    @property
    def total_frames(self) -> int:
        """Steps, ever."""
        return sum(self.total_frames_by_env_name.values())

    def save_finished_trajs(self) -> int:
        """Commit the finished trajectories of this process's actors to disk; returns how many."""
        return self._actor.recorder.flush()


@dataclass(frozen=True)
class Answer:
    """What an environment has answered to a call.

    Attributes:
        value: what it returned; None if it raised.
        error: what it raised, if it is in this process.
        text: traceback of the error; empty if there was none.
        missing: there is no such method or attribute.
    """

    value: Any = None
    error: BaseException | None = None
    text: str = ""
    missing: bool = False


def answer_of(
    view: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], check: Callable[[Any], Any] | None
) -> Answer:
    """The answer of one environment; see `amago.envs.pool.actor_set.ActorSet.call`."""
    try:
        found = getattr(view, name)
    except AttributeError:
        return Answer(text=f"{view.env!r} has no method or attribute {name!r}", missing=True)
    except Exception as err:
        return Answer(error=None if check else err, text=traceback.format_exc())
    try:
        value = found(*args, **kwargs) if callable(found) else found
        if check is not None:
            check(value)
        return Answer(value)
    except (Exception, SystemExit) as err:
        return Answer(error=None if check else err, text=traceback.format_exc())


def take(answer: Answer | None, name: str, number: int) -> Any:
    """The value of an answer; see `amago.envs.pool.ActorPool.call_wait` for what it raises."""
    if answer is None:
        raise ActorError(f"actor {number} did not answer to {name!r}: its worker was lost and is replaced")
    if answer.missing:
        raise AttributeError(f"actor {number}: {answer.text}")
    if answer.error is not None:
        raise answer.error
    if answer.text:
        raise ActorError(f"{name!r} of actor {number} failed: {answer.text}")
    return answer.value
