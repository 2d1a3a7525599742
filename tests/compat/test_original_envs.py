"""Environments as code written for the original system uses them: `amago.envs`."""

import gymnasium as gym
import numpy as np
import pytest
import tiny
from counting_env import CountingEnv, length_of
from messages import naming
from store_helpers import stored

from amago.envs import AMAGO_ENV_LOG_PREFIX, AMAGOEnv, make_pool
from amago.envs.amago_env import EnvCreator, SequenceWrapper
from amago.envs.env_utils import DummyAsyncVectorEnv, space_convert
from amago.envs.exploration import ExplorationWrapper


class Played(AMAGOEnv):
    """Adds a mask of actions to the observations, ends on truncation, pays half a point more, and logs what it likes."""

    def __init__(self):
        super().__init__(env=CountingEnv(0), env_name=None, batched_envs=1)
        self.observation_space["illegal_actions"] = gym.spaces.Box(low=0, high=1, shape=(5,), dtype=bool)

    @property
    def env_name(self):
        return f"{self.env.kind}_{self.env.episode % 2}"

    def inner_reset(self, *args, **kwargs):
        obs, info = self.env.reset(*args, **kwargs)
        return obs | {"illegal_actions": np.eye(5, dtype=bool)[0]}, info | {"legal": [1, 2, 3, 4]}

    def inner_step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs | {"illegal_actions": np.zeros(5, bool)}, reward + 0.5, terminated or truncated, truncated, info

    def step(self, action):
        timestep, reward, terminated, truncated, info = super().step(action)
        info[f"{AMAGO_ENV_LOG_PREFIX} Step"] = float(timestep.time_idx[0])
        return timestep, reward, terminated, truncated, info

    def take_long_break(self):
        return f"break {self.env.episode}"


def test_keys_may_be_added_removed_and_replaced():
    class Reworked(AMAGOEnv):
        def __init__(self):
            super().__init__(CountingEnv(0), "reworked")
            self.observation_space["level"] = gym.spaces.Discrete(4)
            self.observation_space["nested"] = gym.spaces.Dict(a=gym.spaces.Box(-1, 1, (2,), np.float64))
            del self.observation_space.spaces["count"], self.observation_space.spaces["took"]

        def inner_reset(self, *args, **kwargs):
            obs, info = super().inner_reset(*args, **kwargs)
            return obs | {"level": 2, "nested": {"a": np.array([0.5, 0.0])}}, info

        def inner_step(self, action):
            obs, *rest = super().inner_step(action)
            return obs | {"level": 3, "nested": {"a": np.zeros(2)}}, *rest

    env = Reworked()
    env.observation_space["late"] = gym.spaces.Box(0, 1, (1,), np.float32)
    del env.observation_space.spaces["late"]
    timestep, _ = env.reset()
    assert list(env.observation_space.spaces) == list(timestep.obs) == ["level", "nested/a"]
    assert timestep.obs["level"].tolist() == [[0, 0, 1, 0]]
    assert timestep.obs["nested/a"].dtype == np.float32
    assert env.step(0)[0].obs["level"].tolist() == [[0, 0, 0, 1]]

    class Whole(AMAGOEnv):
        def __init__(self):
            super().__init__(gym.make("CartPole-v1"), "whole")
            self.observation_space = gym.spaces.Dict(half=gym.spaces.Box(-9, 9, (2,), np.float32))

        def inner_reset(self, *args, **kwargs):
            obs, info = self.env.reset(*args, **kwargs)
            return {"half": obs[:2]}, info

    assert Whole().reset()[0].obs["half"].shape == (1, 2)

    class Forgotten(AMAGOEnv):
        def __init__(self):
            super().__init__(CountingEnv(0), "forgotten")
            self.observation_space["bag"] = gym.spaces.Box(0, 1, (1,), np.float32)

    with pytest.raises(ValueError, match=naming("forgotten", "missing", "bag")):
        Forgotten().reset()


def test_an_own_form_of_actions_is_seen_and_stored(tmp_path):
    class Halved(AMAGOEnv):
        def make_action_rep(self, action):
            return super().make_action_rep(action) / 2

    class Soft(AMAGOEnv):
        def make_action_rep(self, action):
            return super().make_action_rep(action) * 0.9

    env = SequenceWrapper(Halved(CountingEnv(0, kind="continuous"), "halved"), save_trajs_to=tmp_path / "fifo")
    env.reset()
    env.step(np.array([1.0, -0.5], np.float32))
    assert env.current_timestep[1].tolist() == [[1.0, 0.5, -0.25]]
    env.step(np.array([1.0, -0.5], np.float32))
    env.close()
    (traj,) = stored(tmp_path)
    assert traj.actions.tolist() == [[0.5, -0.25]] * 2
    assert traj.obs["took"][1:].tolist() == [[2.0, 2.5]] * 2, "the environment takes the policy's action"
    soft = Soft(CountingEnv(0), "soft")
    soft.reset()
    with pytest.raises(ValueError, match=naming("make_action_rep", "soft", (1, 5))):
        soft.step(2)


def test_the_name_at_the_end_of_a_rollout_counts():
    class Opponent(AMAGOEnv):
        opponent = "unknown"

        @property
        def env_name(self):
            return f"vs_{self.opponent}"

        def inner_step(self, action):
            self.opponent = "alice"
            return super().inner_step(action)

    env = SequenceWrapper(Opponent(CountingEnv(0)))
    env.reset()
    for _ in range(length_of(0, 0)):
        env.step(1)
    assert env.return_history.data == {"vs_alice": [1.0 + 2.0]}
    assert env.total_frames_by_env_name == {"vs_alice": 2}


def test_subclasses_may_use_the_names_of_our_attributes():
    class Own(AMAGOEnv):
        def __init__(self):
            super().__init__(CountingEnv(0), "own")
            self.horizon, self.last_action = 77, "none yet"

        def inner_step(self, action):
            self.last_action = "hit"
            return self.env.step(action)

    recorder = SequenceWrapper(Own())
    recorder.reset()
    recorder.step(4)
    assert recorder.current_timestep[1][0, 1:].argmax() == 4
    assert (recorder.amago_env.horizon, recorder.amago_env.last_action) == (77, "hit")


def test_environments_side_by_side():
    envs = DummyAsyncVectorEnv([EnvCreator(Played), EnvCreator(Played)])
    assert (len(envs.envs), envs.num_envs, envs.single_action_space.n) == (2, 2, 5)
    obs, infos = envs.reset(seed=3)
    assert (obs["count"].shape, infos["legal"][1]) == ((2, 1, 4), [1, 2, 3, 4])
    for step, took in ((1, [4, 5]), (2, [0, 0])):  # of two steps: reset at the end
        obs, reward, terminated, truncated, infos = envs.step(np.array([[1], [2]], np.uint8))
        assert reward[:, 0].tolist() == [step + 0.5] * 2
        assert terminated.shape == truncated.shape == (2, 1)
        assert obs["count"][:, 0, 0].tolist() == [step % 2] * 2
        assert obs["took"][:, 0, 0].tolist() == took
    assert terminated.all()
    assert infos[f"_{AMAGO_ENV_LOG_PREFIX} Step"].all()
    envs.call_async("current_timestep")
    inputs = envs.call_wait()
    assert [time[0, 0] for _, _, time in inputs] == [0, 0]
    assert envs.call("take_long_break") == ["break 1", "break 1"]
    assert envs.call("kind") == ["discrete"] * 2
    envs.call_async("env_name")
    with pytest.raises(ValueError, match=naming("call_wait")):
        envs.call_async("env_name")
    assert envs.call_wait() == ["discrete_1"] * 2
    with pytest.raises(ValueError, match=naming("call_async")):
        envs.call_wait()
    with pytest.raises(AttributeError, match="not_there"):
        envs.call("not_there")
    with pytest.raises(ValueError, match=naming(3, 2)):
        envs.step(np.zeros((3, 1), int))
    envs.close()


def test_spaces_of_the_older_package():
    class Box:
        low, high, shape, dtype = np.zeros(2, np.float32), np.ones(2, np.float32), (2,), np.dtype(np.float32)

    class Discrete:
        n = np.int64(4)

    class Dict:
        spaces = {"a": Box(), "b": Discrete()}

    converted = space_convert(Dict())
    assert converted == gym.spaces.Dict(a=gym.spaces.Box(0, 1, (2,)), b=gym.spaces.Discrete(4))
    assert space_convert(converted) is converted
    with pytest.raises(TypeError, match=naming("space", "object")):
        space_convert(object())


def test_action_may_be_overridden():
    class Always(ExplorationWrapper):
        def action(self, action):
            assert action.shape == (1,)
            return np.zeros_like(action)

    pool = make_pool(tiny.cartpole, "sync", exploration=Always, seed=0)
    pool.reset()
    pool.step(np.array([[1]]))
    assert pool.rl2s[0, 1:].tolist() == [1.0, 0.0]
    pool.close()
