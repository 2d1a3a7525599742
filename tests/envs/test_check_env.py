"""`amago.check_env` passes what trains, and names each fault of what would not."""

import random
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from composite_envs import SPACES, make_lock, make_locks
from counting_env import CountingEnv
from messages import check_refused, naming
from support.nim import Nim
from tiny import Bits

import amago
from amago import config
from amago.data.findings import CheckError
from amago.envs import AMAGO_ENV_LOG_PREFIX, AMAGOEnv, builtin

METRIC = f"{AMAGO_ENV_LOG_PREFIX} Score"


class Good(gym.Env):
    """Ten steps towards a random number; every fault below is one change of it."""

    observation_space = gym.spaces.Dict(
        at=gym.spaces.Box(-1.0, 1.0, (2,), np.float32),
        card=gym.spaces.Discrete(4),
        pixels=gym.spaces.Box(0, 9, (2, 2), np.uint8),
    )
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.target = 0, self.np_random.uniform(-1, 1)
        return self.observe(), self.info()

    def step(self, action):
        assert 0 <= action < 3
        self.t += 1
        return self.observe(), self.reward(), self.ends(), False, self.info()

    def observe(self):
        return {
            "at": np.array([self.target, self.np_random.uniform(-1, 1)], np.float32), "card": int(self.np_random.integers(4)),
            "pixels": np.full((2, 2), min(self.t, 9), np.uint8),
        }  # fmt: skip

    def reward(self):
        return self.target / self.t

    def ends(self):
        return self.t == 10

    def info(self):
        return {METRIC: float(self.t), "else": object()}


def good():
    return AMAGOEnv(Good(), env_name="Good")


PASS = {
    "good": good, "not wrapped": Good, "cartpole": lambda: gym.make("CartPole-v1"), "pendulum": lambda: gym.make("Pendulum-v1"),
    "lake": lambda: AMAGOEnv(gym.make("FrozenLake-v1")), "blackjack": lambda: gym.make("Blackjack-v1"), "bits": Bits,
    "lake with attempts": lambda: AMAGOEnv(builtin.MetaFrozenLake(4, k_episodes=2)),
    "doors": lambda: AMAGOEnv(builtin.RoomKeyDoor(size=5, meta_rollout_horizon=60)), "tmaze": lambda: builtin.TMazePassive(5),
    "maze": lambda: builtin.MazeRunner(5),
    "alchemy": builtin.SymbolicAlchemy,
    "vectorised": lambda: AMAGOEnv(gym.make_vec("CartPole-v1", num_envs=3), batched_envs=3),
    "vectorised, not wrapped": lambda: gym.make_vec("FrozenLake-v1", num_envs=2), "counting": lambda: CountingEnv(3),
    **{f"actions: {name}": make_lock(name, 5) for name in SPACES}, "a batch of tuples": make_locks("tuple", 3, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", PASS)
def test_what_trains_passes(name):
    amago.check_env(PASS[name])


def test_it_changes_nothing_and_closes_what_it_made():
    closed = []

    class Closes(Good):
        def close(self):
            closed.append(1)

    states = random.getstate(), np.random.get_state()[1].copy()
    amago.check_env(Closes)
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()
    assert closed == [1, 1]


def with_(**methods):
    """`Good` with other methods."""
    return type("Bad", (Good,), methods)


def after(t, bad, ok):
    """A method that returns ``bad`` from step ``t`` on, and before what ``ok`` gives."""
    return lambda self: bad if self.t >= t else ok(self)


def obs(**changes):
    return lambda self: Good.observe(self) | changes


def keys(self):
    found = Good.observe(self)
    del found["card"]
    return found | {"cart": 1}


UNSEEDED = np.random.default_rng()
FAULTS = {
    "reward is None": (with_(reward=after(3, None, Good.reward)), ("step 3", "reward", "None", "one number")),
    "reward is NaN": (with_(reward=after(2, np.nan, Good.reward)), ("step 2", "reward", "nan", "finite")),
    "terminated is None": (with_(ends=lambda self: None), ("terminated", "None", "a bool")),
    "terminated is a number": (with_(ends=lambda self: int(self.t == 10)), ("terminated", 0, "a bool")),
    "info is None": (with_(info=lambda self: None), ("reset()", "info", "None", "dict")),
    "a metric that is text": (with_(info=after(1, {METRIC: "won"}, Good.info)), (METRIC, "won", "a number")),
    "a metric that is NaN": (with_(info=after(1, {METRIC: np.nan}, Good.info)), (METRIC, "nan")),
    "a metric that is a list with text": (with_(info=after(1, {METRIC: [1, "a"]}, Good.info)), (METRIC, "[1, 'a']", "array of numbers")),
    "a shape": (with_(observe=obs(at=np.zeros(3, np.float32))), ("step 0", "'at'", (3,), (2,))),
    "a dtype": (with_(observe=obs(pixels=np.zeros((2, 2)))), ("step 0", "'pixels'", "float64", "uint8")),
    "NaN": (with_(observe=obs(at=np.array([0, np.nan], np.float32))), ("step 0", "'at'", "nan")),
    "bounds": (with_(observe=obs(at=np.array([0, 3], np.float32))), ("'at'", "3.0", (1,), "-1.0 to 1.0")),
    "bounds of integers": (with_(observe=obs(pixels=np.full((2, 2), 200, np.uint8))), ("'pixels'", 200, "0 to 9")),
    "a category": (with_(observe=obs(card=4)), ("'card'", 4, "Discrete(4)")),
    "keys": (with_(observe=keys), ("step 0", ["card"], ["cart"])),
    "old reset": (with_(reset=lambda self, seed=None: Good.reset(self, seed=seed)[0]["at"]), ("reset()", "(observation, info)")),
    "old step": (with_(step=lambda self, action: Good.step(self, action)[:4]), ("step()", "4 values", "terminated, truncated, info")),
    "an exception in step": (with_(reward=lambda self: 1 / (self.t - 4)), ("step(", "ZeroDivisionError", "test_check_env.py")),
    "an exception in reset": (with_(observe=lambda self: self.nothing), ("reset(seed=0)", "AttributeError", "nothing")),
    "an unseeded generator": (with_(reward=lambda self: UNSEEDED.random()), ("the reward", "same seed", "self.np_random", "seeded=False")),
    "a seed that is ignored": (
        with_(reset=lambda self, seed=None, options=None: Good.reset(self, seed=None)), ("first reset", "super().reset(seed=seed)"),
    ),
    "no seed": (with_(reset=lambda self: Good.reset(self)), ("no argument seed", "seed=None")),
    "randomness in the constructor": (
        with_(__init__=lambda self: setattr(self, "goal", UNSEEDED.random()), reward=lambda self: self.goal),
        ("when an environment is made", "reset()", "self.np_random"),
    ),
    "random spaces": (
        with_(__init__=lambda self: setattr(self, "action_space", gym.spaces.Discrete(int(UNSEEDED.integers(3, 10**5))))),
        ("action_space", "differs", "two environments"),
    ),
    "a space that changes": (
        with_(reset=lambda self, seed=None: (setattr(self, "observation_space", gym.spaces.Discrete(2)), Good.reset(self, seed=seed))[1]),
        ("observation_space", "must not change", "Discrete(2)"),
    ),
    "an unbounded action": (with_(action_space=gym.spaces.Box(-np.inf, np.inf, (2,))), ("unbounded",)),
    "text": (with_(observation_space=gym.spaces.Text(5)), ("observation", "Text")),
    "close": (with_(close=lambda self: 1 / 0), ("close()", "ZeroDivisionError")),
    "no environment": (lambda: 3, ("make_env()", 3)),
    "a maker that fails": (lambda: [][0], ("make_env() raised", "IndexError")),
    "a name that is no text": (lambda: AMAGOEnv(with_(env_name=5)()), ("env_name", 5, "str")),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(fault):
    make_env, named = FAULTS[fault]
    assert len(check_found(make_env, "check_env", *named)) == 1


def check_found(make_env, *named):
    with pytest.raises(CheckError, match=naming(*named)) as found:
        amago.check_env(make_env)
    return found.value.problems


def test_faults_of_several_environments():
    class Loose(gym.vector.SyncVectorEnv):
        def step(self, actions):
            *first, terminated, truncated, info = super().step(actions)
            return *first, terminated.astype(int), truncated, info

    env, pendulum = Good(), lambda: gym.make("Pendulum-v1")
    twice = ("make_env()", "same environment twice")
    check_found(lambda: env, *twice)
    check_found(lambda: AMAGOEnv(env), *twice)
    check_found(lambda: AMAGOEnv(Loose([Good, Good]), batched_envs=2), "terminated", "2 bools")
    bad = with_(info=lambda self: {METRIC: "x"}, ends=lambda self: 0, observe=obs(at=np.array([5, 0], np.float32)))
    assert len(check_found(bad, METRIC, "terminated", "'at'")) == 3
    for wrapper in (gym.wrappers.NormalizeObservation, gym.wrappers.NormalizeReward):
        learns = f"{wrapper.__name__} learns statistics in each environment by itself"
        check_found(lambda w=wrapper: AMAGOEnv(gym.wrappers.TimeLimit(w(pendulum()), 20), env_name="P"), learns)
    check_refused(TypeError, (naming("make_env", "lambda"), lambda: amago.check_env(Good())))


@pytest.mark.parametrize("fault", ["an unseeded generator", "no seed", "randomness in the constructor"])
def test_simulators_that_cannot_repeat(fault):
    amago.check_env(FAULTS[fault][0], seeded=False)


def test_illegal_actions_are_not_tried():
    with pytest.raises(CheckError, match="from a heap of"):
        amago.check_env(lambda: AMAGOEnv(Nim(raise_if_illegal=True)))
    config.bind({"ActionMask.key": "action_mask"})
    amago.check_env(lambda: AMAGOEnv(Nim(raise_if_illegal=True)))


class Rows(gym.Env):
    """Three rows with rollouts of 2, 3 and 4 steps, which reset themselves; the last step logs how long the rollout was."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    lengths = np.array([2, 3, 4])
    mask = True

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = np.zeros(3, np.int64)
        return np.zeros((3, 1), np.float32), {}

    def step(self, action):
        self.t += 1
        ended = self.t == self.lengths
        info = {METRIC: np.where(ended, self.t, 0.0)} | ({f"_{METRIC}": ended} if self.mask else {})
        self.t[ended] = 0
        return np.zeros((3, 1), np.float32), np.zeros(3), ended, np.zeros(3, bool), info


def rows(**changes):
    return AMAGOEnv(type("Changed", (Rows,), changes)(), env_name="Rows", batched_envs=3)


def play(make_env):
    with closing(amago.envs.make_pool(make_env, "already_vectorized", parallel_actors=3)) as pool:
        pool.reset()
        for _ in range(24):
            pool.step(np.zeros((3, 1), np.int64))
        return pool.drain().episodes


def test_rows_without_final_info_log_for_the_rollout_that_ended():
    amago.check_env(rows)
    episodes = play(rows)
    assert len(episodes) == 12 + 8 + 6
    assert [e.metrics for e in episodes] == [{"Score": e.length} for e in episodes]
    without = "does not say which have logged one: add info"
    check_found(lambda: rows(mask=False), without, f"_{METRIC}")
    check_refused(amago.envs.ActorError, (without, lambda: play(lambda: rows(mask=False))))


@pytest.mark.parametrize("changes", [{METRIC: np.ones(2)}, {f"_{METRIC}": np.ones(2, bool)}], ids=["values", "mask"])
def test_a_metric_of_another_number_of_rows_is_named(changes):
    class Short(Rows):
        def step(self, action):
            *rest, info = super().step(action)
            return *rest, info | changes

    short = f"info['{next(iter(changes))}'] has 2 values for 3 environments"
    check_found(lambda: AMAGOEnv(Short(), env_name="Short", batched_envs=3), short)
