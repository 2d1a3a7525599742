"""HalfCheetahVel against HalfCheetah-v5 itself, and arithmetic on its rewards."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from run_inside import run_script

from amago.envs import AMAGOEnv
from amago.envs.builtin.half_cheetah_vel import HalfCheetahVel
from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX

EXAMPLE = Path(__file__).parents[2] / "examples" / "12_half_cheetah_vel.py"


def test_without_mujoco_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['mujoco'] = None\n"
        "from amago.envs.builtin.half_cheetah_vel import HalfCheetahVel\n"
        "try: HalfCheetahVel()\n"
        "except ImportError as err: assert \"pip install 'amago[mujoco]'\" in str(err), err\n"
        "else: raise SystemExit('no ImportError')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


pytest.importorskip("mujoco", reason="MuJoCo is not installed: pip install 'amago[mujoco]'")


def metric(i: int, name: str) -> str:
    return f"{AMAGO_ENV_LOG_PREFIX} Attempt {i} {name}"


def actions(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, size=(n, 6)).astype(np.float32)


def test_it_is_half_cheetah_paid_for_another_thing() -> None:
    """Upstream's own environment, put into the same state: the same motion, and its reward tells the velocity."""
    env = HalfCheetahVel(k_episodes=2, episode_length=15, ctrl_cost_weight=0.05)
    upstream = gym.make("HalfCheetah-v5").unwrapped
    env.reset(seed=4)
    upstream.reset(seed=0)
    errors, total, log = [], 0.0, {}
    for t, action in enumerate(actions(30)):
        if t % 15 == 0:
            data = env._env.unwrapped.data  # type: ignore[attr-defined]
            upstream.set_state(data.qpos, data.qvel)  # type: ignore[attr-defined]
            errors, total = [], 0.0
        obs, reward, terminated, truncated, info = env.step(action)
        theirs, forward, _, _, _ = upstream.step(action.astype(np.float64))
        squares = float((action.astype(np.float64) ** 2).sum())
        velocity = float(forward) + 0.1 * squares  # HalfCheetah-v5 pays the velocity less 0.1 times the squares
        errors.append(abs(velocity - env.target))
        total += reward
        assert reward == pytest.approx(-errors[-1] - 0.05 * squares, abs=1e-9)
        assert (terminated, truncated) == (False, t == 29)
        log |= info
        if t != 14:  # which shows the next attempt
            np.testing.assert_allclose(obs[:17], theirs, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(obs[17:], [(t % 15 + 1) / 15, t // 15 / 2], rtol=1e-6)
        else:
            np.testing.assert_allclose(obs[17:], [0.0, 0.5])
            assert np.abs(obs[:17]).max() < 1.0, "the noise of a reset"
        if t % 15 == 14:
            i = t // 15
            assert info == {
                metric(i, "Velocity Error"): pytest.approx(np.mean(errors)),
                metric(i, "Return"): pytest.approx(total),
            }
        else:
            assert info == {}
    assert len(log) == 4


def test_standing_still_misses_the_target() -> None:
    env = HalfCheetahVel((1.5, 1.5), episode_length=100)
    env.reset(seed=0)
    assert env.target == 1.5
    total = sum(env.step(np.zeros(6))[1] for _ in range(100))
    assert total == pytest.approx(-150.0, abs=15.0)  # it falls onto its feet, and hardly moves on average


def test_targets_are_uniform_in_their_range_and_stay_for_a_rollout() -> None:
    env = HalfCheetahVel((0.5, 2.5), k_episodes=2, episode_length=2)
    env.reset(seed=0)
    targets = []
    for _ in range(300):
        env.reset()
        targets.append(env.target)
        for action in actions(3):
            env.step(action)
            assert env.target == targets[-1]
    assert 0.5 <= min(targets) < 0.55
    assert 2.45 < max(targets) <= 2.5
    assert np.mean(targets) == pytest.approx(1.5, abs=4 * (2 / np.sqrt(12)) / np.sqrt(300))


def test_seeds_spaces_and_horizon() -> None:
    a, b = HalfCheetahVel(k_episodes=2, episode_length=5), HalfCheetahVel(k_episodes=2, episode_length=5)
    b.reset(seed=99)
    b.step(actions(1)[0])  # a history leaves no trace
    assert a.horizon == 10
    for seed in (3, 4, None):  # None: the generators go on alike
        first, other = a.reset(seed=seed)[0], b.reset(seed=seed)[0]
        np.testing.assert_array_equal(first, other)
        assert a.target == b.target
        for action in actions(10):
            mine, theirs = a.step(action), b.step(action)
            np.testing.assert_array_equal(mine[0], theirs[0])
            assert mine[1:] == theirs[1:]
            assert mine[0] in a.observation_space
        with pytest.raises(gym.error.ResetNeeded):
            a.step(actions(1)[0])
    wrapped = AMAGOEnv(HalfCheetahVel(), env_name="cheetah")
    assert wrapped.horizon == 200
    assert wrapped.reset(seed=0)[0].obs["observation"].shape == (1, 19)
    wrapped.step(actions(1))


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"target_range": (2.0, 1.0)}, ValueError, "target_range must be (low, high) with low <= high, got (2.0, 1.0)"),
    ({"target_range": 1.0}, TypeError, "target_range must be (low, high), got 1.0"),
    ({"target_range": (0.0, float("inf"))}, ValueError, "target_range[1] must be finite, got inf"),
    ({"k_episodes": 0}, ValueError, "k_episodes must be at least 1, got 0"),
    ({"episode_length": 0}, ValueError, "episode_length must be at least 1, got 0"),
    ({"ctrl_cost_weight": -0.1}, ValueError, "ctrl_cost_weight must be at least 0, got -0.1"),
]


@pytest.mark.parametrize(("arguments", "error", "said"), WRONG, ids=[w[2] for w in WRONG])
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        HalfCheetahVel(**arguments)


def test_wrong_actions_are_refused() -> None:
    env = HalfCheetahVel()
    with pytest.raises(gym.error.ResetNeeded):
        env.step(np.zeros(6))
    env.reset(seed=0)
    for action in (np.zeros(5), np.full(6, 1.1), np.full(6, np.nan)):
        with pytest.raises(ValueError, match=r"action must be 6 numbers in \[-1, 1\], got"):
            env.step(action)


def test_example_tests_speeds_apart(tmp_path: Path) -> None:
    arguments = (
        "--run_name tiny --buffer_dir . --epochs 1 --grads_per_epoch 2 --parallel_actors 2 --batch_size 4 --memory_size 16 "
        "--memory_layers 1 --no_async --seed 0 --quiet --k_episodes 2 --episode_length 6"
    )
    outcome = run_script(EXAMPLE, arguments.split(), tmp_path)
    assert outcome.code == 0, outcome.text
    rows = [json.loads(line) for line in (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()]
    keys = " ".join(key for row in rows if row["section"] == "test" for key in row["values"])
    for name in ("train", "test"):
        for i in range(2):
            assert re.search(
                f"Attempt {i} Velocity Error.*half_cheetah_vel_{name}|half_cheetah_vel_{name}.*Attempt {i} Velocity", keys
            )
    told = run_script(EXAMPLE, ["--help"], tmp_path)
    assert told.code == 0
    assert "--test_range LOW HIGH" in told.text
