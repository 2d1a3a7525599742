"""gymnax through the wrapper: against gymnax itself row by row, known optima, and the ends of rollouts."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from amago.envs import AMAGOEnv
from amago.envs.builtin.gymnax_envs import GymnaxCompatibility

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'amago[gymnax]'", exc_type=ImportError)
gymnax = pytest.importorskip("gymnax", reason="gymnax is not installed: pip install 'amago[gymnax]'", exc_type=ImportError)


def make(name: str, num_envs: int, **changes: Any) -> GymnaxCompatibility:
    env, params = gymnax.make(name)
    return GymnaxCompatibility(env, num_envs, params.replace(**changes))


SHOWN = {
    "MemoryChain-bsuite": gym.spaces.Box(-np.inf, np.inf, (3,), np.float32),
    "Catch-bsuite": gym.spaces.Box(-np.inf, np.inf, (10, 5), np.float32),  # declared as int32
    "FourRooms-misc": gym.spaces.Box(-np.inf, np.inf, (4,), np.float32),  # declared as float32, returned as int32
    "FrozenLake-misc": gym.spaces.Discrete(16),
    "Pendulum-v1": gym.spaces.Box(-np.inf, np.inf, (3,), np.float32),
}


@pytest.mark.parametrize("name", SHOWN)
def test_spaces_hold_and_seeds_decide(name: str) -> None:
    env = make(name, 8)
    assert env.single_observation_space == SHOWN[name]
    runs: list[list[Any]] = []
    for seed in (5, 5, 6):
        env.action_space.seed(0)
        obs, _ = env.reset(seed=seed)
        runs.append([])
        for _ in range(8):
            assert obs.shape == env.observation_space.shape
            assert obs.dtype == (np.int32 if name == "FrozenLake-misc" else np.float32)
            assert all(env.single_observation_space.contains(np.int64(o) if o.ndim == 0 else o) for o in obs)
            obs, reward, *_ = env.step(env.action_space.sample())
            assert reward.dtype == np.float32
            runs[-1] += [obs.tolist(), reward.tolist()]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2] or name == "FrozenLake-misc"


def test_rows_are_gymnax_itself() -> None:
    """One row of CartPole, driven by hand with the same states and actions."""
    env = make("CartPole-v1", 4)
    own, params = gymnax.make("CartPole-v1")
    env.reset(seed=0)
    env.action_space.seed(1)
    for _ in range(30):
        before = jax.tree.map(lambda leaf: leaf[2], env._state[0])
        action = env.action_space.sample()
        obs, reward, terminated, truncated, info = env.step(action)
        expected, state, r, done, _ = own.step_env(jax.random.key(0), before, action[2], params)
        assert (reward[2], terminated[2]) == (r, done)
        ended = terminated[2] or truncated[2]
        assert np.allclose(info["final_obs"][2] if ended else obs[2], expected, atol=1e-6)
        if not ended:
            assert int(env._state[0].time[2]) == int(state.time)


def test_time_limits_truncate_and_keep_the_last_observation() -> None:
    """Pendulum never terminates; at the limit, velocity and angle must go on from what the step led to, not from a reset."""
    inner = make("Pendulum-v1", 3, max_steps_in_episode=5)
    env = AMAGOEnv(inner, batched_envs=3)
    env.reset(seed=0)
    for step in range(1, 11):
        timestep, _, terminated, truncated, info = env.step(np.zeros((3, 1), dtype=np.float32))
        assert not terminated.any()
        assert truncated.all() == (step % 5 == 0)
        assert ("final_obs" in info) == (step % 5 == 0)
        if "final_obs" in info:
            assert env.auto is not None
            assert env.auto.last_obs is not None
            assert np.array_equal(env.auto.last_obs["observation"], info["final_obs"])
            assert not np.array_equal(info["final_obs"], timestep.obs["observation"])
            assert np.allclose((info["final_obs"][:, :2] ** 2).sum(-1), 1, atol=1e-5)  # cosine and sine
