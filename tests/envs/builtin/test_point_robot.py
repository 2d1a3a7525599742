"""PointRobot against geometry: what the straight way earns, where goals lie, what a policy without memory can expect."""

from __future__ import annotations

import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from run_inside import run_script

from amago.envs import AMAGOEnv
from amago.envs.builtin import PointRobot
from amago.envs.builtin.point_robot import GOAL_REGIONS
from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX

EXAMPLE = Path(__file__).parents[3] / "examples" / "18_point_robot.py"


def straight(env: PointRobot, obs: np.ndarray) -> np.ndarray:
    """The best action of one who knows the goal: each axis is left as soon as it can be."""
    return np.clip((np.array(env.goal) - obs[:2].astype(np.float64)) / env.step_size, -1.0, 1.0)


def best_return(goal: tuple[float, float], step: float, length: int) -> float:
    """Of one attempt; both coordinates shrink by ``step`` a step until they are 0, independently."""
    return -sum(math.hypot(*(max(0.0, abs(g) - step * t) for g in goal)) for t in range(1, length + 1))


def metric(i: int, name: str) -> str:
    return f"{AMAGO_ENV_LOG_PREFIX} Attempt {i} {name}"


@settings(max_examples=60, deadline=None)
@given(
    k=st.integers(1, 4),
    length=st.integers(1, 25),
    region=st.sampled_from(GOAL_REGIONS),
    step=st.floats(0.02, 0.5),
    seed=st.integers(0, 2**31 - 1),
)
def test_the_straight_way_earns_what_geometry_says(k: int, length: int, region: str, step: float, seed: int) -> None:
    env = PointRobot(k, length, region, step)
    obs, info = env.reset(seed=seed)
    assert info == {}
    goal = env.goal
    assert env.horizon == k * length
    log: dict[str, float] = {}
    total = 0.0
    for t in range(env.horizon):
        assert obs in env.observation_space
        np.testing.assert_allclose(obs[2:], [(t % length) / length, (t // length) / k], rtol=1e-6)
        if t % length == 0:
            assert obs[0] == obs[1] == 0.0, "each attempt begins at the origin"
        obs, reward, terminated, truncated, info = env.step(straight(env, obs))
        total += reward
        assert env.goal == goal, "one goal for all attempts"
        assert (terminated, truncated) == (t == env.horizon - 1, False)
        assert bool(info) == ((t + 1) % length == 0)
        log |= info
    assert obs in env.observation_space
    best = best_return(goal, step, length)
    assert total == pytest.approx(k * best, rel=1e-4, abs=1e-4)
    missing = math.hypot(*(max(0.0, abs(g) - step * length) for g in goal))
    for i in range(k):
        assert log.pop(metric(i, "Final Distance")) == pytest.approx(missing, abs=1e-5)
        assert log.pop(metric(i, "Return")) == pytest.approx(best, rel=1e-4, abs=1e-4)
    assert not log
    with pytest.raises(gym.error.ResetNeeded, match="PointRobot"):
        env.step(np.zeros(2))


def test_the_story_of_one_rollout() -> None:
    env = PointRobot(2, 2, step_size=0.5)
    env.reset(seed=0)
    env.goal = (0.0, 1.0)
    script = [
        ([0.0, 1.0], [0.0, 0.5, 0.5, 0.0], -0.5),
        ([1.0, 1.0], [0.0, 0.0, 0.0, 0.5], -0.5),  # was at (0.5, 1): paid for that, and put back
        ([0.0, -1.0], [0.0, -0.5, 0.5, 0.5], -1.5),
        ([-1.0, -0.5], [-0.5, -0.75, 1.0, 1.0], -math.hypot(0.5, 1.75)),
    ]
    infos = []
    for action, seen, paid in script:
        obs, reward, _, _, info = env.step(np.array(action, dtype=np.float32))
        np.testing.assert_allclose(obs, seen)
        assert reward == pytest.approx(paid)
        infos.append(info)
    assert infos[0] == infos[2] == {}
    assert infos[1] == {metric(0, "Final Distance"): pytest.approx(0.5), metric(0, "Return"): pytest.approx(-1.0)}
    last = math.hypot(0.5, 1.75)
    assert infos[3] == {metric(1, "Final Distance"): pytest.approx(last), metric(1, "Return"): pytest.approx(-1.5 - last)}


def goals(region: str, n: int = 4000) -> np.ndarray:
    env = PointRobot(goal_region=region)
    env.reset(seed=1)
    out = []
    for _ in range(n):
        env.reset()
        out.append(env.goal)
    return np.array(out)


def test_goals_are_uniform_where_they_should_be() -> None:
    half, full, square = (goals(region) for region in GOAL_REGIONS)
    np.testing.assert_allclose(np.hypot(*half.T), 1.0)
    np.testing.assert_allclose(np.hypot(*full.T), 1.0)
    assert half[:, 1].min() >= 0.0
    assert full[:, 1].min() < -0.99
    assert np.abs(square).max() <= 1.0
    # means of uniform distributions, within four standard errors
    assert half.mean(0) == pytest.approx([0.0, 2 / math.pi], abs=4 * 0.71 / math.sqrt(4000))
    assert full.mean(0) == pytest.approx([0.0, 0.0], abs=4 * 0.71 / math.sqrt(4000))
    assert square.mean(0) == pytest.approx([0.0, 0.0], abs=4 * 0.58 / math.sqrt(4000))
    for values, low, high in [(np.arctan2(half[:, 1], half[:, 0]), 0, math.pi), (square[:, 0], -1, 1), (square[:, 1], -1, 1)]:
        counts, _ = np.histogram(values, bins=8, range=(low, high))
        assert counts.sum() == 4000
        assert ((counts - 500) ** 2 / 500).sum() < 26.0  # chi-square, 7 degrees: 26 has p = 0.0005


def test_standing_still_pays_the_radius() -> None:
    env = PointRobot(3, 20)
    for seed in range(5):
        env.reset(seed=seed)
        assert sum(env.step((0, 0))[1] for _ in range(60)) == pytest.approx(-60.0)


def test_rewards_tell_where_the_goal_is() -> None:
    """Three distances from points not on a line fix a point: what a policy with memory can use."""
    env = PointRobot(2, 20, "square")
    env.reset(seed=5)
    r0, r1, r2 = (-env.step(a)[1] for a in ([1, 0], [0, 1], [-1, 0]))  # at (.1, 0), (.1, .1), (0, .1)
    # |g - p|^2 differ linearly: between the first two y is fixed, between the last two x
    y = (r0**2 - r1**2 + 0.1**2) / 0.2
    x = (r2**2 - r1**2 + 0.1**2) / 0.2
    assert (x, y) == pytest.approx(env.goal, abs=1e-6)


def test_one_seed_gives_one_rollout() -> None:
    a, b = PointRobot(), PointRobot()
    first = a.reset(seed=3)
    assert repr(b.reset(seed=3)) == repr(first)
    assert a.goal == b.goal
    a.reset()
    assert a.goal != b.goal
    b.reset()
    assert a.goal == b.goal
    a.step([0.3, -0.2])
    copy = pickle.loads(pickle.dumps(a))
    assert repr(a.step([1, 1])) == repr(copy.step([1, 1]))


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


def test_without_memory_final_rewards_leave_seven_tenths_to_the_goal() -> None:
    """The best place for all goals of the semicircle lies on its axis; found by search, independent of the environment."""
    angles = np.linspace(0.0, math.pi, 2001)
    means = {y: float(np.hypot(np.cos(angles), np.sin(angles) - y).mean()) for y in np.linspace(0.0, 1.0, 101)}
    place, best = min(means.items(), key=lambda item: item[1])
    assert best == pytest.approx(0.713, abs=0.005)
    env = PointRobot(1, 8, step_size=0.25, rewards="final")
    total = 0.0
    for seed in range(400):
        env.reset(seed=seed)
        total -= sum(env.step([0.0, place / 8 / 0.25])[1] for _ in range(8))
    assert total / 400 == pytest.approx(best, abs=0.06)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_is_a_gymnasium_environment() -> None:
    check_env(PointRobot(), skip_render_check=True)


def test_in_an_amago_env() -> None:
    env = AMAGOEnv(PointRobot(1, 4))
    assert env.horizon == 4
    assert env.env_name == "PointRobot"
    step, _ = env.reset(seed=0)
    assert {k: v.shape for k, v in step.obs.items()} == {"observation": (1, 4)}
    env.step(np.array([[1.0, -1.0]], dtype=np.float32))
    assert env.unwrapped.goal[1] >= 0.0


def test_text() -> None:
    env = PointRobot(2, 3, render_mode="ansi")
    env.reset(seed=0)
    env.goal = (1.0, 0.0)
    env.step([1, 0.5])
    assert env.render() == "attempt 1 of 2, step 1 of 3: at (+0.10, +0.05), goal (+1.00, +0.00), distance 0.90"
    for _ in range(5):
        env.step([0, 0])
    assert str(env.render()).startswith("attempt 2 of 2, step 3 of 3: ")
    assert PointRobot().render() is None


WRONG: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"k_episodes": 0}, ValueError),
    ({"k_episodes": 1.5}, TypeError),
    ({"episode_length": 0}, ValueError),
    ({"goal_region": "disc"}, ValueError),
    ({"rewards": "sparse"}, ValueError),
    ({"step_size": 0.0}, ValueError),
    ({"step_size": float("nan")}, ValueError),
    ({"render_mode": "human"}, ValueError),
]


@pytest.mark.parametrize(("arguments", "error"), WRONG)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception]) -> None:
    name, value = list(arguments.items())[-1]
    with pytest.raises(error, match=f"{name}.*got {re.escape(repr(value))}"):
        PointRobot(**arguments)


@pytest.mark.parametrize(
    ("action", "error"),
    [([1.1, 0], ValueError), ([0, float("nan")], ValueError), ([0.0], TypeError), (1, TypeError), (["a", "b"], TypeError)],
    ids=repr,
)
def test_wrong_actions_are_refused(action: Any, error: type[Exception]) -> None:
    env = PointRobot()
    env.reset(seed=0)
    with pytest.raises(error, match=r"action must be two numbers in \[-1, 1\], got"):
        env.step(action)


def test_a_step_needs_a_reset() -> None:
    with pytest.raises(gym.error.ResetNeeded):
        PointRobot().step([0, 0])


def test_example_logs_distances_by_attempt(tmp_path: Path) -> None:
    arguments = (
        "--run_name tiny --buffer_dir . --epochs 1 --grads_per_epoch 2 --parallel_actors 2 --batch_size 4 --memory_size 16 "
        "--memory_layers 1 --no_async --seed 0 --quiet --k_episodes 2 --episode_length 6"
    )
    assert run_script(EXAMPLE, arguments.split(), tmp_path).code == 0
    rows = [json.loads(line) for line in (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()]
    keys = {key for row in rows if row["section"] == "test" for key in row["values"]}
    for i in range(2):
        assert any(f"Attempt {i} Final Distance" in key for key in keys), sorted(keys)
