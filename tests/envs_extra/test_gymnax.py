"""gymnax through the wrapper: against gymnax itself row by row, known optima, and the ends of rollouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from run_inside import run_script

from amago.envs import AMAGOEnv
from amago.envs.builtin.gymnax_envs import GymnaxCompatability, GymnaxCompatibility

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'amago[gymnax]'", exc_type=ImportError)
gymnax = pytest.importorskip("gymnax", reason="gymnax is not installed: pip install 'amago[gymnax]'", exc_type=ImportError)

EXAMPLE = Path(__file__).parents[2] / "examples" / "02_gymnax.py"


def make(name: str, num_envs: int, **changes: Any) -> GymnaxCompatibility:
    env, params = gymnax.make(name)
    return GymnaxCompatibility(env, num_envs, params.replace(**changes))


def sampled(env: GymnaxCompatibility) -> Any:
    return np.stack([env.single_action_space.sample() for _ in range(env.num_envs)])


def test_both_spellings_are_one() -> None:
    assert GymnaxCompatability is GymnaxCompatibility


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
        before = jax.tree.map(lambda leaf: leaf[2], env._state)
        action = env.action_space.sample()
        obs, reward, terminated, truncated, info = env.step(action)
        expected, state, r, done, _ = own.step_env(jax.random.key(0), before, action[2], params)
        assert reward[2] == r
        assert terminated[2] == done
        ended = terminated[2] or truncated[2]
        assert np.allclose(info["final_obs"][2] if ended else obs[2], expected, atol=1e-6)
        if not ended:
            assert int(jax.tree.map(lambda leaf: leaf[2], env._state).time) == int(state.time)


@pytest.mark.parametrize(("mood", "expected"), [("remember", 1.0), ("contradict", -1.0)])
@pytest.mark.parametrize("length", [3, 20])
def test_memory_chain_pays_for_memory(length: int, mood: str, expected: float) -> None:
    env = AMAGOEnv(make("MemoryChain-bsuite", 16, memory_length=length, max_steps_in_episode=length + 1), batched_envs=16)
    timestep, _ = env.reset(seed=0)
    assert env.horizon == length + 1
    for _ in range(2):
        bit = (timestep.obs["observation"][:, 2:] > 0).astype(np.int64)
        assert 0 < bit.mean() < 1
        total = np.zeros(16)
        for step in range(length + 1):
            timestep, reward, terminated, _, _ = env.step(bit if mood == "remember" else 1 - bit)
            total += reward
            assert terminated.all() == (step == length)
        assert (total == expected).all()
        assert (timestep.time_idx == 0).all()


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


def test_random_catch_is_won_as_often_as_chance_says() -> None:
    """A ball falls in one of 5 columns; one who never moves stays in the middle and catches one in five."""
    env = make("Catch-bsuite", 500)
    env.reset(seed=0)
    total, ended = 0.0, 0
    for _ in range(9):
        _, reward, terminated, truncated, _ = env.step(np.ones(500, dtype=np.int64))
        total, ended = total + reward.sum(), ended + int((terminated | truncated).sum())
    assert ended == 500
    assert abs((total / 500 + 1) / 2 - 0.2) < 0.08


@pytest.mark.parametrize(("arguments", "error", "said"), [
    (lambda env: (gymnax.make("Catch-bsuite"), 2), TypeError, "gymnax.make returns a pair"),
    (lambda env: (env, 0), ValueError, "num_envs must be at least 1, got 0"),
    (lambda env: (env, 2, None, "gpu"), ValueError, "device='gpu' is not available"),
], ids=["pair", "rows", "device"])  # fmt: skip
def test_wrong_arguments_are_named(arguments: Any, error: type[Exception], said: str) -> None:
    if "gpu" in said and any(d.platform != "cpu" for d in jax.devices()):
        pytest.skip("there is a GPU here")
    with pytest.raises(error, match=said):
        GymnaxCompatibility(*arguments(gymnax.make("Catch-bsuite")[0]))


def test_wrong_calls_are_refused() -> None:
    env = make("Catch-bsuite", 2)
    with pytest.raises(gym.error.ResetNeeded, match="call reset"):
        env.step(np.zeros(2, dtype=np.int64))
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"shape \(2,\).*got \(3,\)"):
        env.step(np.zeros(3, dtype=np.int64))


FEW = (
    "--run_name tiny --buffer_dir . --epochs 1 --grads_per_epoch 2 --timesteps_per_epoch 24 --parallel_actors 3 --batch_size 4 "
    "--memory_size 16 --memory_layers 1 --seed 0 --quiet --env_device cpu"
)


def test_the_example_trains(tmp_path: Path) -> None:
    outcome = run_script(EXAMPLE, [*FEW.split(), "--configs", "zoo/gymnax"], tmp_path)
    assert outcome.code == 0, outcome.text
    assert "gymnax_MemoryChain-bsuite" in outcome.text
    rows = [json.loads(line) for line in (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()]
    assert {row["section"] for row in rows} == {"val", "rollout", "buffer", "train", "test"}


def test_the_example_names_a_wrong_parameter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"MemoryChain-bsuite has no parameter 'length'; it has .*memory_length"):
        run_script(EXAMPLE, [*FEW.split(), "--params", "length=3"], tmp_path)
