import gymnasium as gym
import numpy as np
from counting_env import CountingEnv, make_counting, make_vector
from messages import check_refused, naming

from amago.envs import AMAGOEnv

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


def test_a_row_that_begins_anew_has_no_past():
    env = make_vector(3, AutoresetMode.SAME_STEP)()
    env.reset()
    for _ in range(20):
        ts, *_ = env.step(np.ones((3, 1), int))
        assert not ts.terminal[ts.time_idx == 0].any()
        assert not ts.rl2[ts.time_idx == 0].any()


GUESSES = [float("inf"), -1, 0, True, "short", np.array([10, 20]), (5, 50), float("nan"), 1000, 2.5, len]


def test_the_horizon_is_the_outermost_time_limit_or_attribute():
    assert AMAGOEnv(gym.make("CartPole-v1")).horizon == 500
    env = Plain(gym.spaces.Discrete(2))
    assert AMAGOEnv(env).horizon is None
    for env.horizon in GUESSES:
        assert AMAGOEnv(gym.wrappers.TimeLimit(env, 50)).horizon == 50
        assert AMAGOEnv(env).horizon == (1000 if isinstance(env.horizon, int) and env.horizon > 1 else None)

    class Thrice(gym.Wrapper):
        horizon = 150

    assert AMAGOEnv(Thrice(gym.wrappers.TimeLimit(env, 50))).horizon == 150
