"""Exploration as code written for the original system uses it: `amago.envs.exploration`."""

import gymnasium as gym
import numpy as np
import pytest

from amago import config
from amago.envs import AMAGOEnv, SequenceWrapper, make_pool
from amago.envs.exploration import BilevelEpsilonGreedy, EpsilonGreedy, ExplorationWrapper


@pytest.fixture(autouse=True)
def _no_bindings_left():
    yield
    config.clear()


def cartpole():
    return AMAGOEnv(gym.make("CartPole-v1"), "cartpole")


class Flip(ExplorationWrapper):
    """The other of two actions, in the first three steps of a rollout."""

    def add_exploration_noise(self, action, local_step):
        assert action.shape == (self.batched_envs, 1)
        assert local_step.shape == (self.batched_envs,)
        return np.where(local_step[:, None] < 3, 1 - action, action).astype(action.dtype)


class Doubled(EpsilonGreedy):
    """Half as much noise as a rollout goes on, with a random stream and a factor of its own."""

    def __init__(self, env, **kwargs):
        super().__init__(env, **kwargs)
        self.resets = 0

    def reset(self, *args, **kwargs):
        out = super().reset(*args, **kwargs)
        self.resets += 1
        self.rng = np.random.default_rng(self.resets)
        self.global_multiplier = np.full(self.batched_envs, 0.5)
        return out

    def current_eps(self, local_step):
        eps = super().current_eps(local_step)
        eps[local_step > 2] = 0.0
        return eps


def test_a_hook_of_two_arguments():
    env = Flip(cartpole())
    assert isinstance(env, gym.ActionWrapper)
    env.reset()
    assert env.action(np.array([1])).tolist() == [0]
    assert env.action(np.array([[1]])).tolist() == [[0]]
    taken = []
    for _ in range(5):
        timestep = env.step(np.array([1], np.uint8))[0]
        taken.append(int(timestep.prev_action.argmax()))
    assert taken == [0, 0, 0, 1, 1]
    assert env.global_step == 5
    assert (env.env_name, env.step_count.tolist(), env.discrete, env.batched_envs) == ("cartpole", [5], True, 1)


def test_action_may_be_overridden():
    class Always(ExplorationWrapper):
        def action(self, action):
            assert action.shape == (1,)
            return np.zeros_like(action)

    pool = make_pool(cartpole, "sync", exploration=Always, seed=0)
    pool.reset()
    pool.step(np.array([[1]]))
    assert pool.rl2s[0, 1:].tolist() == [1.0, 0.0]
    pool.close()


def test_subclasses_write_the_generator_the_factor_and_epsilon():
    env = Doubled(cartpole(), eps_start=1.0, eps_end=1.0)
    assert env.randomize_eps is True
    env.reset()
    assert env.current_eps(np.array([0])).tolist() == [0.5]
    assert env.current_eps(np.array([3])).tolist() == [0.0]
    state = env.state_dict()
    for _ in range(4):
        env.step(0)
    again = Doubled(cartpole(), eps_start=1.0, eps_end=1.0)
    again.load_state_dict(state)
    assert again.global_multiplier.tolist() == [0.5]


def test_a_generator_of_another_kind_does_not_stop_a_checkpoint():
    class Old(Flip):
        def reset(self, *args, **kwargs):
            out = super().reset(*args, **kwargs)
            self.rng = np.random.RandomState(0)
            return out

    env = Old(cartpole())
    env.reset()
    env.step(1)
    fresh = Old(cartpole())
    fresh.load_state_dict(env.state_dict())
    assert fresh.global_step == 1


def test_exploration_with_attributes_of_its_own():
    """Gymnasium before 1.0 forwards attributes; some clients add them by hand."""

    class ByHand(EpsilonGreedy):
        def __init__(self, amago_env):
            super().__init__(amago_env)
            self.env_name = "by hand"

        @property
        def step_count(self):
            return self.env.step_count

    recorder = SequenceWrapper(ByHand(cartpole()))
    recorder.reset()
    recorder.step(1)
    assert recorder.env.env_name == "by hand"
    assert recorder.step_count.tolist() == [1]


def test_defaults():
    env = EpsilonGreedy(cartpole())
    assert (env.eps_start, env.eps_end, env.steps_anneal, env.randomize_eps) == (1.0, 0.05, 1_000_000, True)
    env.reset()
    assert env.global_multiplier.shape == (1,)
    assert 0 <= env.global_multiplier[0] < 1
    two = BilevelEpsilonGreedy(cartpole(), rollout_horizon=10, randomize_eps=False)
    two.reset()
    assert two.current_eps(np.array([0, 10])).tolist() == pytest.approx([1.0, 0.8])


def test_several_rows_draw_factors_of_their_own():
    vec = gym.make_vec("CartPole-v1", num_envs=3)
    env = EpsilonGreedy(AMAGOEnv(vec, "cartpole", batched_envs=3))
    env.reset()
    assert env.global_multiplier.shape == (3,)
    assert env.action(np.zeros((3, 1), np.int64)).shape == (3, 1)
    env.close()
