"""HalfCheetahVel against HalfCheetah-v5 itself, and arithmetic on its rewards."""

import gymnasium as gym
import numpy as np
import pytest

from amago.envs.builtin.half_cheetah_v4_vel import HalfCheetahVel
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX

pytest.importorskip("mujoco", reason="MuJoCo is not installed: pip install 'amago[mujoco]'")

ATTEMPT = f"{AMAGO_ENV_LOG_PREFIX} Attempt"


def test_it_is_half_cheetah_paid_for_another_thing() -> None:
    """Upstream's own environment, put into the same state: the same motion, and its reward tells the velocity."""
    env = HalfCheetahVel(k_episodes=2, episode_length=15, ctrl_cost_weight=0.05)
    upstream = gym.make("HalfCheetah-v5").unwrapped
    env.reset(seed=4)
    upstream.reset(seed=0)
    errors, total, log = [], 0.0, {}
    for t, action in enumerate(np.random.default_rng(0).uniform(-1, 1, size=(30, 6)).astype(np.float32)):
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
                f"{ATTEMPT} {i} Velocity Error": pytest.approx(np.mean(errors)),
                f"{ATTEMPT} {i} Return": pytest.approx(total),
            }
        else:
            assert info == {}
    assert len(log) == 4
