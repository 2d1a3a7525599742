import gymnasium as gym
import numpy as np
import pytest
from counting_env import ACTIONS, CountingEnv, is_terminated, length_of, make_counting, make_vector, reward_of
from messages import check_refused, naming

from amago.envs import AMAGOEnv, SequenceWrapper

AutoresetMode = gym.vector.AutoresetMode


class Plain(gym.Env):
    """The least an environment can be; ``reset`` takes no seed, as in many meta-learning environments."""

    def __init__(self, action_space, observation_space=None):
        self.action_space = action_space
        self.observation_space = observation_space or gym.spaces.Box(-1, 1, (2,), np.float64)
        self.actions = []

    def reset(self):
        return np.zeros(2), {}

    def step(self, action):
        self.actions.append(action)
        return np.full(2, 0.5), np.array([1.5]), np.bool_(False), False, {}


def test_shapes_and_types_of_one_environment():
    env = AMAGOEnv(Plain(gym.spaces.Discrete(3)), env_name="plain")
    ts, info = env.reset(seed=3)
    assert (info, env.env_name, env.rl2_space.shape) == ({}, "plain", (4,))
    assert (ts.obs["observation"].shape, ts.obs["observation"].dtype) == ((1, 2), np.float32)
    assert not ts.rl2.any()
    ts, reward, terminated, truncated, _ = env.step(np.array([[2]]))
    arrays = (reward, terminated, truncated, ts.time_idx, ts.terminal)
    assert [(a.shape, a.dtype) for a in arrays] == [((1,), np.dtype(d)) for d in (np.float32, bool, bool, np.int64, bool)]
    np.testing.assert_array_equal(ts.rl2, np.array([[1.5, 0, 0, 1]], np.float32))
    assert (ts.time_idx[0], env.unwrapped.actions) == (1, [2])


def test_actions_reach_the_environment_in_its_own_form():
    env = AMAGOEnv(Plain(gym.spaces.Box(np.array([0.0, -4.0]), np.array([10.0, 4.0]), dtype=np.float64)))
    env.reset()
    env.step(np.array([[-1.0, 0.5]], np.float32))
    np.testing.assert_allclose(env.unwrapped.actions[0], [0.0, 2.0])
    many = AMAGOEnv(Plain(gym.spaces.Discrete(70_000, start=-5)))
    many.reset()
    ts = many.step(np.array([[69_999]]))[0]
    assert (many.unwrapped.actions, ts.prev_action.shape) == ([69_994], (1, 70_000))
    assert ts.prev_action[0, 69_999] == ts.prev_action.sum() == 1.0


def test_what_does_not_fit_is_refused():
    """But for the mistakes of `bad_input_cases.py`."""
    same_step, odd = AutoresetMode.SAME_STEP, make_vector(2, AutoresetMode.SAME_STEP)().unwrapped
    odd.metadata = {"autoreset_mode": "sometimes"}
    env, many = make_counting(0)(), make_vector(3, same_step)()
    env.reset()
    many.reset()
    check_refused(
        ValueError,
        (naming("autoreset_mode", "'sometimes'", "AutoresetMode"), lambda: AMAGOEnv(odd, batched_envs=2)),
        (naming("shape", (3,), (3, 1)), lambda: many.step(np.array([0, 1, 2]))),
    )
    check_refused(
        TypeError,
        (naming("env_name", 3), lambda: AMAGOEnv(CountingEnv(0), env_name=3).env_name),
        (naming("action", 2.0, (1, 1)), lambda: env.step(2.0)),
        (naming("action", True, (1, 1)), lambda: env.step(True)),
    )


def test_names():
    assert AMAGOEnv(gym.make("CartPole-v1")).env_name == "CartPole-v1"
    assert AMAGOEnv(Plain(gym.spaces.Discrete(2))).env_name == "Plain"

    class Named(AMAGOEnv):
        @property
        def env_name(self):
            return f"level {self.env.episode}"

    recorder = SequenceWrapper(Named(CountingEnv(0)))
    for _ in range(3):
        recorder.reset()
        recorder.step(np.array([[1]]))
    _, frames = recorder.drain()
    assert frames == {"level 0": 1, "level 1": 1, "level 2": 1}


def test_names_of_rows():
    class Both(AMAGOEnv):
        @property
        def env_name(self):
            return "both"

    def vector(names):
        made = make_vector(3, AutoresetMode.SAME_STEP)().unwrapped
        made.env_name = names
        return made

    rows = AMAGOEnv(vector(["b", "x/a", "b"]), batched_envs=3)
    assert (rows.env_name, rows.env_names) == ("b+x_a", ["b", "x_a", "b"])
    for names in (["b", "a", "b"], "a", 3):
        assert Both(vector(names), batched_envs=3).env_names == ["both"] * 3, "the overridden property counts"
    check_refused(TypeError, (naming("env_name", ["a"]), lambda: AMAGOEnv(vector(["a"]), batched_envs=3).env_name))


def oracle(mode, steps, n):
    """What n counting environments show, written down from Gymnasium's description of each mode.

    Yields per step (time, episode) of each row after it, and the rows in which the action counted.
    """
    state, waiting = [(0, 0)] * n, [False] * n
    for _ in range(steps):
        real = [not w for w in waiting]
        for i in range(n):
            t, e = state[i]
            if waiting[i]:
                state[i], waiting[i] = (0, e + 1), False
            elif t + 1 < length_of(i, e):
                state[i] = (t + 1, e)
            elif mode is AutoresetMode.NEXT_STEP:
                state[i], waiting[i] = (t + 1, e), True
            else:
                state[i] = (0, e + 1)
        yield list(state), real


@pytest.mark.parametrize("kind", list(ACTIONS))
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_autoreset_mode_against_its_description(mode, kind):
    n = 3
    env = make_vector(n, mode, kind=kind)()
    ts, _ = env.reset(seed=1)
    np.testing.assert_array_equal(ts.obs["count"][:, 0], 0)
    before = [(0, 0)] * n
    for after, real in oracle(mode, 80, n):
        action = env.action_spec.from_env(np.stack([np.asarray(env.action_spec.space.sample()) for _ in range(n)]))
        ts, reward, terminated, truncated, _ = env.step(action.reshape(n, -1))
        assert env.auto is not None
        np.testing.assert_array_equal(env.auto.real, real)
        for i, (t, e) in enumerate(after):
            t0, e0 = before[i]
            opened = t == 0
            ended = real[i] and t0 + 1 == length_of(i, e0)
            assert (tuple(ts.obs["count"][i, [0, 2]]), env.auto.opened[i]) == ((t, e), opened)
            assert ts.time_idx[i] == t
            assert reward[i] == (np.float32(reward_of(i, e0, t0 + 1)) if real[i] else 0)
            assert terminated[i] == (ended and is_terminated(i, e0))
            assert truncated[i] == (ended and not is_terminated(i, e0))
            np.testing.assert_array_equal(ts.reward[i], 0 if opened else reward[i])
            if opened:
                assert not ts.prev_action[i].any()
                assert not ts.terminal[i]
            if ended:
                last = env.auto.last_obs or ts.obs
                assert tuple(last["count"][i, [0, 2]]) == (t0 + 1, e0)
                assert env.auto.last_known[i]
        before = after
    env.close()


class Attribute(gym.Env):
    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, **attributes):
        vars(self).update(attributes)


GUESSES = [float("inf"), -1, 0, True, "short", np.array([10, 20]), (5, 50), float("nan"), 1000, 2.5, len]


def test_the_horizon_is_the_outermost_time_limit_or_attribute():
    assert AMAGOEnv(gym.make("CartPole-v1")).horizon == 500
    assert AMAGOEnv(Plain(gym.spaces.Discrete(2))).horizon is None
    for horizon in GUESSES:
        limited = gym.wrappers.TimeLimit(Attribute(horizon=horizon), 50)
        assert AMAGOEnv(limited, env_name="E").horizon == 50
        alone = AMAGOEnv(Attribute(horizon=horizon), env_name="E").horizon
        assert alone == (1000 if isinstance(horizon, int) and horizon > 1 else None)

    class Thrice(gym.Wrapper):
        horizon = 150

    assert AMAGOEnv(Thrice(gym.wrappers.TimeLimit(Attribute(), 50)), env_name="E").horizon == 150
