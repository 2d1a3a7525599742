import gymnasium as gym
import numpy as np
import pytest
from counting_env import ACTIONS, CountingEnv, make_counting, make_vector
from messages import naming

from amago.envs import AMAGOEnv, EpsilonGreedy, SequenceWrapper, make_pool
from amago.envs.autoreset import autoreset_mode

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
    assert info == {}
    assert ts.obs["observation"].shape == (1, 2)
    assert ts.obs["observation"].dtype == np.float32
    assert not ts.rl2.any()
    ts, reward, terminated, truncated, _ = env.step(np.array([[2]]))
    for array, dtype in (
        (reward, np.float32),
        (terminated, bool),
        (truncated, bool),
        (ts.time_idx, np.int64),
        (ts.terminal, bool),
    ):
        assert array.shape == (1,)
        assert array.dtype == dtype
    np.testing.assert_array_equal(ts.rl2, np.array([[1.5, 0, 0, 1]], np.float32))
    assert ts.time_idx[0] == 1
    assert env.env_name == "plain"
    assert env.unwrapped.actions == [2]
    assert env.rl2_space.shape == (4,)


def test_timesteps_of_earlier_steps_do_not_change():
    env = make_counting(0)()
    kept = [env.reset()[0]] + [env.step(np.array([[a]]))[0] for a in (1, 4)]
    assert [int(ts.time_idx[0]) for ts in kept] == [0, 1, 2]
    assert [int(ts.prev_action.argmax()) if ts.prev_action.any() else None for ts in kept] == [None, 1, 4]


def test_actions_reach_the_environment_in_its_own_form():
    env = AMAGOEnv(Plain(gym.spaces.Box(np.array([0.0, -4.0]), np.array([10.0, 4.0]), dtype=np.float64)))
    env.reset()
    env.step(np.array([[-1.0, 0.5]], np.float32))
    np.testing.assert_allclose(env.unwrapped.actions[0], [0.0, 2.0])
    many = AMAGOEnv(Plain(gym.spaces.Discrete(70_000, start=-5)))
    many.reset()
    ts = many.step(np.array([[69_999]]))[0]
    assert many.unwrapped.actions == [69_994]
    assert ts.prev_action.shape == (1, 70_000)
    assert ts.prev_action[0, 69_999] == ts.prev_action.sum() == 1.0


def test_seventy_thousand_actions_through_a_pool():
    pool = make_pool([lambda: AMAGOEnv(Plain(gym.spaces.Discrete(70_000, start=7)))] * 2, "sync")
    pool.reset()
    pool.step(np.array([[40_000], [69_999]]))
    pool.step(np.array([[33_000], [5]]))
    assert [int(row[1:].argmax()) for row in pool.rl2s] == [33_000, 5]
    assert (pool.rl2s[:, 1:].sum(axis=1) == 1).all()
    pool.close()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="unbounded"):
        AMAGOEnv(Plain(gym.spaces.Box(-np.inf, np.inf, (2,))))
    with pytest.raises(TypeError, match=naming("'note'", "Text")):
        AMAGOEnv(Plain(gym.spaces.Discrete(2), gym.spaces.Dict(note=gym.spaces.Text(5))))
    with pytest.raises(TypeError, match=naming("env", "already")):
        AMAGOEnv(make_counting(0)())
    with pytest.raises(TypeError, match=naming("'CartPole-v1'", "reset()")):
        AMAGOEnv("CartPole-v1")
    with pytest.raises(ValueError, match=naming("batched_envs", 0)):
        AMAGOEnv(CountingEnv(0), batched_envs=0)
    with pytest.raises(ValueError, match=naming("batched_envs", 5, "num_envs=3")):
        AMAGOEnv(make_vector(3, AutoresetMode.SAME_STEP)().env, batched_envs=5)
    with pytest.raises(ValueError, match=naming("autoreset_mode", "'sometimes'", "AutoresetMode")):
        vec = make_vector(2, AutoresetMode.SAME_STEP)().unwrapped
        vec.metadata = {"autoreset_mode": "sometimes"}
        AMAGOEnv(vec, batched_envs=2)
    with pytest.raises(TypeError, match=naming("EpsilonGreedy", "AMAGOEnv", "CountingEnv")):
        EpsilonGreedy(CountingEnv(0))
    with pytest.raises(TypeError, match=naming("env_name", 3)):
        _ = AMAGOEnv(CountingEnv(0), env_name=3).env_name


def test_what_is_no_action_is_refused():
    env = make_counting(0)()
    env.reset()
    with pytest.raises(TypeError, match=naming("action", 2.0, (1, 1))):
        env.step(2.0)
    with pytest.raises(TypeError, match=naming("action", True, (1, 1))):
        env.step(True)
    with pytest.raises(ValueError, match=naming("shape", (2,), (1, 1), "from_env")):
        env.step(np.array([2, 1]))
    for wrong in (5, np.array([-1]), np.array([1.5])):
        with pytest.raises(ValueError, match="stored"):
            env.step(wrong)
    many = make_vector(3, AutoresetMode.SAME_STEP)()
    many.reset()
    with pytest.raises(ValueError, match=naming("shape", (3,), (3, 1))):
        many.step(np.array([0, 1, 2]))


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

    rows = AMAGOEnv(vector(["b", "a", "b"]), batched_envs=3)
    assert (rows.env_name, rows.env_names) == ("a+b", ["b", "a", "b"])
    for names in (["b", "a", "b"], "a", 3):
        assert Both(vector(names), batched_envs=3).env_names == ["both"] * 3, "the overridden property counts"
    with pytest.raises(TypeError, match=naming("env_name", ["a"])):
        _ = AMAGOEnv(vector(["a"]), batched_envs=3).env_name


def test_horizon_is_the_environments_own_or_the_time_limit():
    assert AMAGOEnv(gym.make("CartPole-v1")).horizon == 500
    assert AMAGOEnv(Plain(gym.spaces.Discrete(2))).horizon is None
    plain = Plain(gym.spaces.Discrete(2))
    plain.horizon = 12
    assert AMAGOEnv(gym.wrappers.TimeLimit(plain, 99)).horizon == 12


def oracle(mode, steps, n):
    """What n counting environments show, written down from Gymnasium's description of each mode.

    Yields per step (time, episode) of each row after it, and the rows in which the action counted.
    """
    from counting_env import length_of

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
    from counting_env import is_terminated, length_of, reward_of

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
            assert tuple(ts.obs["count"][i, [0, 2]]) == (t, e)
            assert env.auto.opened[i] == opened
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


def test_modes_may_be_given_in_words():
    class Env:
        metadata: dict = {}

    for value, expected in ((AutoresetMode.NEXT_STEP, "next_step"), ("NextStep", "next_step"), ("same-step", "same_step")):
        Env.metadata = {"autoreset_mode": value}
        assert autoreset_mode(Env()) == expected
    Env.metadata = None
    assert autoreset_mode(Env()) == "same_step"
