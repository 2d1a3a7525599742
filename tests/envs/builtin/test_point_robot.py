"""PointRobot against geometry: what the straight way earns, where goals lie, what a policy without memory can expect."""

import math

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.point_robot import GOAL_REGIONS, PointRobot

from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX

ATTEMPT = f"{AMAGO_ENV_LOG_PREFIX} Attempt"


def straight(env: PointRobot, obs: np.ndarray) -> np.ndarray:
    """The best action of one who knows the goal: each axis is left as soon as it can be."""
    return np.clip((np.array(env.goal) - obs[:2].astype(np.float64)) / env.step_size, -1.0, 1.0)


def best_return(goal: tuple[float, float], step: float, length: int) -> float:
    """Of one attempt; both coordinates shrink by ``step`` a step until they are 0, independently."""
    return -sum(math.hypot(*(max(0.0, abs(g) - step * t) for g in goal)) for t in range(1, length + 1))


@settings(max_examples=60, deadline=None)
@given(
    k=st.integers(1, 4), length=st.integers(1, 25), region=st.sampled_from(GOAL_REGIONS), step=st.floats(0.02, 0.5),
    seed=st.integers(0, 2**31 - 1),
)  # fmt: skip
def test_the_straight_way_earns_what_geometry_says(k: int, length: int, region: str, step: float, seed: int) -> None:
    env = PointRobot(k, length, region, step)
    obs, info = env.reset(seed=seed)
    assert info == {}
    goal = env.goal
    assert env.horizon == k * length
    log: dict[str, float] = {}
    total = 0.0
    for t in range(env.horizon):
        np.testing.assert_allclose(obs[2:], [(t % length) / length, (t // length) / k], rtol=1e-6)
        if t % length == 0:
            assert obs[0] == obs[1] == 0.0, "each attempt begins at the origin"
        obs, reward, terminated, truncated, info = env.step(straight(env, obs))
        total += reward
        assert env.goal == goal, "one goal for all attempts"
        assert (terminated, truncated) == (t == env.horizon - 1, False)
        assert bool(info) == ((t + 1) % length == 0)
        log |= info
    best = best_return(goal, step, length)
    assert total == pytest.approx(k * best, rel=1e-4, abs=1e-4)
    missing = math.hypot(*(max(0.0, abs(g) - step * length) for g in goal))
    for i in range(k):
        assert log.pop(f"{ATTEMPT} {i} Final Distance") == pytest.approx(missing, abs=1e-5)
        assert log.pop(f"{ATTEMPT} {i} Return") == pytest.approx(best, rel=1e-4, abs=1e-4)
    assert not log
    with pytest.raises(gym.error.ResetNeeded, match="PointRobot"):
        env.step(np.zeros(2))


def test_final_rewards_come_once_an_attempt_and_a_step_puts_the_robot_back() -> None:
    env = PointRobot(2, 3, "circle", 0.5, rewards="final")
    assert env.horizon == 7
    env.reset(seed=4)
    rewards, obs, ends = [], [], []
    for _ in range(7):
        o, reward, done, _, info = env.step([1.0, -0.5])
        rewards.append(reward)
        obs.append(o.tolist())
        ends.append((done, len(info)))
    distance = math.hypot(1.5 - env.goal[0], -0.75 - env.goal[1])
    assert rewards == pytest.approx([0, 0, -distance, 0, 0, 0, -distance])
    assert ends == [(False, 0), (False, 0), (False, 2), (False, 0), (False, 0), (False, 0), (True, 2)]
    assert obs[2] == pytest.approx([1.5, -0.75, 1.0, 0.5])  # where the first attempt has ended
    assert obs[3] == pytest.approx([0.0, 0.0, 0.0, 0.5])  # its action did nothing
    assert obs[4] == pytest.approx([0.5, -0.25, 1 / 3, 0.5])
