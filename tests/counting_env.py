"""An environment that says where every number came from: step, actor, episode, and the action that it was given."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from amago.data.extras import ExtraField
from amago.data.trajectory import StoredTraj
from amago.envs import AMAGO_ENV_LOG_PREFIX, AMAGOEnv

ACTIONS: dict[str, gym.Space[Any]] = {
    "discrete": gym.spaces.Discrete(5, start=3),
    "continuous": gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32)),
    "multibinary": gym.spaces.MultiBinary(4),
}


def length_of(actor: int, episode: int) -> int:
    return 2 + (3 * actor + 5 * episode) % 7


def is_terminated(actor: int, episode: int) -> bool:
    """Whether an episode ends by termination."""
    return (actor + episode) % 2 == 0


def is_truncated(actor: int, episode: int) -> bool:
    """Whether an episode is cut: those that do not terminate, and some that terminate at the same step."""
    return not is_terminated(actor, episode) or episode % 3 == 2


def reward_of(actor: int, episode: int, t: int) -> float:
    """Of the step that leads to time t."""
    return t + 100.0 * actor + 0.25 * episode


def label_of(actor: int, episode: int, t: int) -> int:
    """The extra field of the step that leads to time t."""
    return 10_000 * actor + 100 * episode + t


EXTRAS = (
    ExtraField("task", rows="1", shape=(2,), dtype="float32"),
    ExtraField("privileged", rows="T+1", shape=(1, 3)),
    ExtraField("label", rows="T", dtype="int32"),
    ExtraField("from_policy", rows="T", dtype="float64", source="policy"),
)


def policy_value(actor: int, episode: int, t: int) -> float:
    """The policy's extra field of the action chosen at time t."""
    return label_of(actor, episode, t) + 0.5


class CountingEnv(gym.Env[Any, Any]):
    """Observation: count = [t, actor, episode, torch imported], took = the action that led here (zeros at t = 0).

    ``fault`` happens once, at the first step of a file's life that reaches episode 1, t = 2, and creates the file: "raise",
    "kill" (this process), "hang"; "always" raises every time.

    With ``extras``, `EXTRAS` are in its info; ``bad(t)`` may change them.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(
        self, actor: int, kind: str = "discrete", fault: str = "", flag: str = "", changing_name: bool = False,
        extras: bool = False, bad: Any = None,
    ):  # fmt: skip
        self.actor, self.kind, self.fault, self.flag, self.changing_name = actor, kind, fault, flag, changing_name
        self.extras, self.bad = extras, bad
        self.action_space = ACTIONS[kind]
        self.width = 1 if kind == "discrete" else int(np.prod(self.action_space.shape or ()))
        big = np.float32(np.inf)
        self.observation_space = gym.spaces.Dict(
            {"count": gym.spaces.Box(-big, big, (4,), np.float32), "took": gym.spaces.Box(-big, big, (self.width,), np.float32)}
        )
        self.episode, self.t, self.seeds = -1, 0, []

    @property
    def env_name(self) -> str:
        return f"counting-{self.episode % 3}" if self.changing_name else "counting"

    def _obs(self, took: Any) -> dict[str, Any]:
        count = np.array([self.t, self.actor, self.episode, "torch" in sys.modules], np.float32)
        return {"count": count, "took": np.asarray(took, np.float32).reshape(self.width)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode += 1
        self.t = 0
        return self._obs(np.zeros(self.width)), self._info(("task", "privileged"))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        assert self.t < length_of(self.actor, self.episode), "stepped after its end"
        self.t += 1
        if self.fault:
            self._misbehave()
        info: dict[str, Any] = {"unlogged": 7.0} | self._info(("label", "privileged"))
        if self.t == 2:
            info[f"{AMAGO_ENV_LOG_PREFIX} Episode Number"] = float(self.episode)
        info[f"{AMAGO_ENV_LOG_PREFIX}_time"] = self.t
        ended = self.t == length_of(self.actor, self.episode)
        terminated, truncated = (ended and ends(self.actor, self.episode) for ends in (is_terminated, is_truncated))
        return self._obs(action), reward_of(self.actor, self.episode, self.t), terminated, truncated, info

    def _info(self, names: tuple[str, ...]) -> dict[str, Any]:
        if not self.extras:
            return {}
        values: dict[str, Any] = {
            "task": np.array([self.actor, self.episode], np.float64),
            "privileged": np.array([[self.t, self.actor, self.episode]], np.float32),
            "label": label_of(self.actor, self.episode, self.t),
        }
        info = {name: values[name] for name in names}
        return info if self.bad is None else self.bad(self.t, info)

    def _misbehave(self) -> None:
        if self.fault == "always":
            raise RuntimeError("this environment is always broken")
        if self.episode < 1 or self.t < 2 or os.path.exists(self.flag):
            return
        with open(self.flag, "w") as file:
            file.write("once")
        if self.fault == "raise":
            raise RuntimeError("the environment has a bad day")
        if self.fault == "kill":
            os.kill(os.getpid(), 9)
        if self.fault == "hang":
            time.sleep(3600)


def make_counting(actor: int, **kwargs: Any) -> Callable[[], AMAGOEnv]:
    def make() -> AMAGOEnv:
        return AMAGOEnv(CountingEnv(actor, **kwargs))

    return make


def make_vector(n: int, mode: gym.vector.AutoresetMode, **kwargs: Any) -> Callable[[], AMAGOEnv]:
    def make() -> AMAGOEnv:
        makers = [lambda i=i: CountingEnv(i, **kwargs) for i in range(n)]
        return AMAGOEnv(gym.vector.SyncVectorEnv(makers, autoreset_mode=mode), "counting", batched_envs=n)

    return make


def check_traj(traj: StoredTraj, kind: str, checked_last: bool = True) -> tuple[int, int, int, int]:
    """Assert that every number of a stored trajectory is where it belongs; returns (actor, episode, start time, length)."""
    from amago.spaces import action_spec

    spec = action_spec(ACTIONS[kind])
    count, n = traj.obs["count"], len(traj)
    actor, episode = int(count[0, 1]), int(count[0, 2])
    rows = slice(None) if checked_last else slice(0, n)
    times = traj.start_time + np.arange(n + 1)
    np.testing.assert_array_equal(count[rows, 0], times[rows])
    assert (count[rows, 1] == actor).all()
    assert (count[rows, 2] == episode).all()
    np.testing.assert_array_equal(traj.rews[:, 0], [np.float32(reward_of(actor, episode, t)) for t in times[1:]])
    took = np.stack([np.reshape(spec.to_env(a), -1) for a in traj.actions]).astype(np.float32)
    stop = n if checked_last else n - 1
    np.testing.assert_array_equal(took[:stop], traj.obs["took"][1 : stop + 1])
    at_end = times[-1] == length_of(actor, episode)
    assert not traj.dones[:-1].any()
    assert traj.dones[-1, 0] == (at_end and is_terminated(actor, episode))
    frozen = traj.derive(spec).validate()
    np.testing.assert_array_equal(frozen.time_idxs[:, 0], times)
    np.testing.assert_array_equal(frozen.rl2s[1:, :1], traj.rews)
    np.testing.assert_array_equal(frozen.rl2s[1:, 1:], spec.to_vector(traj.actions))
    if traj.start_time == 0:
        assert not frozen.rl2s[0].any()
    else:
        assert frozen.rl2s[0, 0] == np.float32(reward_of(actor, episode, traj.start_time))
        assert traj.prev_action is not None
        np.testing.assert_array_equal(np.reshape(spec.to_env(traj.prev_action), -1).astype(np.float32), traj.obs["took"][0])
        np.testing.assert_array_equal(frozen.rl2s[0, 1:], spec.to_vector(traj.prev_action))
    if traj.extras:
        check_extras(traj.extras, actor, episode, times)
    return actor, episode, traj.start_time, n


def check_extras(extras: dict[str, Any], actor: int, episode: int, times: Any) -> None:
    """Assert that the extra fields of transitions between these times, T + 1 of them, are where they belong."""
    found = {k: np.asarray(v) for k, v in extras.items()}
    assert list(found) == sorted(x.name for x in EXTRAS)
    assert {x.name: x.dtype for x in EXTRAS} == {k: v.dtype.name for k, v in found.items()}
    np.testing.assert_array_equal(found["task"], [[actor, episode]])
    np.testing.assert_array_equal(found["privileged"], [[[t, actor, episode]] for t in times])
    np.testing.assert_array_equal(found["label"], [label_of(actor, episode, t) for t in times[1:]])
    np.testing.assert_array_equal(found["from_policy"], [policy_value(actor, episode, t) for t in times[:-1]])
