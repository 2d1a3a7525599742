"""Environments in JAX: one adapter for several packages, and actors that share memory with them."""

from typing import Any

import numpy as np
import pytest
import torch
from store_helpers import stored

from amago.envs import AMAGOEnv
from amago.envs.pool import make_pool
from amago.registry import require

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'amago[gymnax]'", exc_type=ImportError)
from amago.envs.builtin.jax_envs import JaxRows, JaxVectorEnv  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of these packages
ROWS = 4


class Counting(JaxRows):
    """Row by row, a count of steps and whether a rollout lasts 3 or 5 steps; it is truncated then. The reward is 10 times the count and
    the action."""

    def __init__(self) -> None:
        import gymnasium as gym

        def observe(count: Any, length: Any) -> Any:
            return jax.numpy.stack([count, length]).astype(np.float32)

        def reset_row(_: object, key: Any) -> Any:
            length = jax.random.choice(key, jax.numpy.array([3, 5]))
            return (jax.numpy.int32(0), length), observe(0, length)

        def step_row(_: object, key: Any, state: Any, action: Any) -> Any:
            count, length = state[0] + 1, state[1]
            ended, (new, first) = count == length, reset_row(None, key)
            kept = jax.tree.map(
                lambda a, b: jax.numpy.where(ended, a, b), (new, first), ((count, length), observe(count, length))
            )
            reward = (10 * count + action).astype(np.float32)
            return *kept, reward, ended & False, ended, observe(count, length), {"AMAGO_LOG_METRIC Length": length}

        spaces = gym.spaces.Box(0, 99, (2,), np.float32), gym.spaces.Discrete(3)
        super().__init__(ROWS, *spaces, reset_row, step_row, "gymnax", "cpu", arrays="jax")


def test_last_observations_of_truncated_rollouts_are_recorded(tmp_path: Any) -> None:
    recorder = {"save_trajs_to": str(tmp_path / "fifo"), "save_trajs_as": "segments"}
    pool = make_pool(
        lambda: AMAGOEnv(Counting(), "count", ROWS), "already_vectorized", parallel_actors=ROWS, recorder=recorder, seed=0
    )
    pool.reset()
    for step in range(100):
        pool.step(np.full((ROWS, 1), step % 3))
    stats = pool.drain()
    pool.close()
    trajs = stored(tmp_path)
    assert sum(map(len, trajs)) == sum(e.length for e in stats.episodes) > 90 * ROWS
    assert {e.length for e in stats.episodes} == {3, 5}
    for traj in trajs:
        count, length = traj.obs["observation"].T
        assert count.tolist() == list(range(len(traj) + 1))
        assert (length == len(traj)).all()
        assert not traj.dones.any()
        assert (traj.rews[:, 0] == 10 * count[1:] + traj.actions[:, 0]).all()
    assert all(e.metrics == {"Length": e.length} for e in stats.episodes)


def test_arrays_share_memory_with_tensors() -> None:
    """In both directions, bools and whole numbers included, on one device."""
    from amago.envs.pool.device import as_jax, as_tensor

    env = Counting()
    obs, _ = env.reset(seed=0)
    actions = torch.ones(ROWS, dtype=torch.int32)
    given = as_jax(actions)
    assert given.unsafe_buffer_pointer() == actions.data_ptr()
    assert as_tensor(obs).data_ptr() == obs.unsafe_buffer_pointer()
    _, reward, terminated, truncated, info = env.step(given)
    for array in (reward, terminated, truncated, info["final_obs"]):
        tensor = as_tensor(array)
        assert tensor.data_ptr() == array.unsafe_buffer_pointer()
        assert np.array_equal(tensor.numpy(), np.asarray(array))


def gymnax() -> Any:
    return require("gymnax", "gymnax").make("CartPole-v1")[0]


def xland() -> Any:
    return require("xminigrid", "xland").make("MiniGrid-Empty-5x5")[0]


def navix() -> Any:
    return require("navix").make("Navix-Empty-5x5-v0", max_steps=20)


def brax() -> Any:
    return require("brax.envs").create("fast", auto_reset=False, episode_length=7)


@pytest.mark.parametrize("make", [gymnax, xland, navix, brax])
def test_packages(make: Any) -> None:
    """Rollouts end at the time limit at the latest, and each leaves its last observation."""
    try:
        env = make()
    except ImportError as err:
        pytest.skip(str(err))
    rows = AMAGOEnv(JaxVectorEnv(env, ROWS, time_limit=9), batched_envs=ROWS)
    pool = make_pool(lambda: rows, "already_vectorized", parallel_actors=ROWS, seed=0)
    pool.reset()
    for _ in range(20):
        pool.step(np.stack([pool.action_spec.from_env(pool.action_spec.space.sample()) for _ in range(ROWS)]))
    episodes = pool.drain().episodes
    assert len(episodes) >= 2 * ROWS
    assert all(1 <= e.length <= 9 for e in episodes)
    pool.close()


def test_craftax_is_traced() -> None:
    """Its step is not compiled here, which takes minutes."""
    craftax = pytest.importorskip("craftax.craftax_env", exc_type=ImportError)
    env = JaxVectorEnv(craftax.make_craftax_env_from_name("Craftax-Classic-Symbolic-v1", auto_reset=False), ROWS, time_limit=9)
    keys = jax.random.split(jax.random.key(0), ROWS)
    state, obs = jax.eval_shape(jax.vmap(env.reset_row, (None, 0)), (), keys)
    out = jax.eval_shape(jax.vmap(env.step_row, (None, 0, 0, 0)), (), keys, state, jax.numpy.zeros(ROWS, int))
    assert obs.shape == out[1].shape == (ROWS, *env.single_observation_space.shape)


def test_environments_that_reset_themselves_are_refused() -> None:
    envs = pytest.importorskip("brax.envs", exc_type=ImportError)
    with pytest.raises(ValueError, match="auto_reset=False"):
        JaxVectorEnv(envs.create("fast", auto_reset=True), ROWS)
    with pytest.raises(TypeError, match="without the params"):
        JaxVectorEnv((1, 2), ROWS)
