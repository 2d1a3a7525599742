"""The suite's reading of collected cheetahs, against the environment itself."""

import numpy as np
import pytest

from amago.envs.builtin.half_cheetah_v4_vel import HalfCheetahVel
from benchmarks.suite import gait

pytest.importorskip("mujoco", reason="MuJoCo is not installed: pip install 'amago[mujoco]'")


@pytest.mark.parametrize("seed", range(4))
def test_the_target_of_a_real_rollout_is_found(seed):
    env, rng = HalfCheetahVel((0.0, 3.0)), np.random.default_rng(seed)
    env.reset(seed=seed)
    velocities, actions, rewards = [], [], []
    over = False
    while not over:
        actions.append(rng.uniform(-1.0, 1.0, 6).astype(np.float32))
        obs, reward, _, over, _ = env.step(actions[-1])
        velocities.append(obs[gait.VELOCITY])
        rewards.append(reward)
    found = gait.target_of(gait.Rollout(*(np.array(x, np.float64) for x in (velocities, actions, rewards))))
    env.close()
    assert found == pytest.approx(env.target, abs=0.15)
