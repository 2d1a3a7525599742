"""RoomKeyDoor against an oracle that knows the room, and against arithmetic on its horizon."""

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amago.envs.builtin import RoomKeyDoor
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX

Cell = tuple[int, int]
STAY = 4


def path(start: Cell, end: Cell) -> list[int]:
    """A shortest way in an empty room: |dx| + |dy| actions."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    return [0 if dx > 0 else 1] * abs(dx) + [2 if dy > 0 else 3] * abs(dy)


def distance(a: Cell, b: Cell) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def oracle_return(start: Cell, key: Cell, goal: Cell, limit: int, horizon: int) -> int:
    """What perfect knowledge earns: whole cycles of d1 + d2 steps and one to reset, then what is left over."""
    d1, d2 = distance(start, key), distance(key, goal)
    cycle, gain = (d1 + d2 + 1, 2) if d1 + d2 <= limit else (limit + 1, 1) if d1 <= limit else (limit + 1, 0)
    full, rest = divmod(horizon, cycle)
    return full * gain + (rest >= d1 and gain >= 1) + (rest >= d1 + d2 and gain >= 2)


@settings(max_examples=80, deadline=None)
@given(
    size=st.integers(2, 9), limit=st.integers(1, 40), horizon=st.integers(1, 200), dark=st.booleans(),
    shuffle=st.booleans(), seed=st.integers(0, 2**31 - 1),
)  # fmt: skip
def test_an_oracle_earns_exactly_what_the_horizon_allows(
    size: int, limit: int, horizon: int, dark: bool, shuffle: bool, seed: int
) -> None:
    env = RoomKeyDoor(dark, size, limit, horizon, randomize_actions=shuffle)
    obs, info = env.reset(seed=seed)
    assert info == {}
    start, key, goal = (env.locations[name] for name in ("start", "key", "goal"))
    assert len({start, key, goal}) == 3
    inverse = {meaning: action for action, meaning in enumerate(env.action_order)}
    plan = path(start, key) + path(key, goal)
    # the trial ends with the plan or at the limit; then one ignored action puts the agent back
    trial = [inverse[a] for a in plan[:limit]] + [0]
    if len(plan) < limit:
        assert len(trial) == len(plan) + 1
    assert env.horizon == horizon
    total, log = 0.0, {}
    for t in range(horizon):
        obs, reward, terminated, _, info = env.step(trial[t % len(trial)])
        log |= info
        total += reward
        assert terminated == (t == horizon - 1)
        if t % len(trial) == len(trial) - 1:  # the reset step
            assert reward == 0.0
            np.testing.assert_allclose(obs[:4], [start[0] / size, start[1] / size, 0, 0], rtol=1e-6)
    assert total == oracle_return(start, key, goal, limit, horizon)
    assert log[f"{AMAGO_ENV_LOG_PREFIX} Doors Opened"] + log[f"{AMAGO_ENV_LOG_PREFIX} Keys Found"] == total
    trials = [log[f"{AMAGO_ENV_LOG_PREFIX} Trial {i} Return"] for i in range(len(log) - 2)]
    ended, rest = divmod(horizon, len(trial))
    assert len(trials) == ended + (rest == len(trial) - 1)
    assert len(set(trials)) <= 1
    with pytest.raises(gym.error.ResetNeeded):
        env.step(0)


def test_the_story_of_one_rollout() -> None:
    env = RoomKeyDoor(False, 4, 5, 15, (0, 0), (2, 0), (2, 1), False)
    obs, _ = env.reset(seed=0)
    shown = [2 / 4, 1 / 4, 2 / 4, 0]  # the door, then the key
    np.testing.assert_allclose(obs, [0, 0, 0, 0, *shown])
    script = [
        (0, [1 / 4, 0, 0, 0.2], 0.0),
        (0, [2 / 4, 0, 1, 0.4], 1.0),  # the key
        (STAY, [2 / 4, 0, 1, 0.6], 0.0),  # which is there once a trial
        (2, [2 / 4, 1 / 4, 1, 0.8], 1.0),  # the door
        (2, [0, 0, 0, 0], 0.0),  # ignored: back at the start
        (3, [0, 0, 0, 0.2], 0.0),  # a wall
        (2, [0, 1 / 4, 0, 0.4], 0.0),
        (0, [1 / 4, 1 / 4, 0, 0.6], 0.0),
        (0, [2 / 4, 1 / 4, 0, 0.8], 0.0),  # the door does not open without the key
        (3, [2 / 4, 0, 1, 1.0], 1.0),  # the limit
        (0, [0, 0, 0, 0], 0.0),  # ignored: a new trial, and the key is gone
        (0, [1 / 4, 0, 0, 0.2], 0.0),
        (0, [2 / 4, 0, 1, 0.4], 1.0),
        (STAY, [2 / 4, 0, 1, 0.6], 0.0),
        (STAY, [2 / 4, 0, 1, 0.8], 0.0),  # the horizon
    ]
    infos = []
    for i, (action, own, reward) in enumerate(script):
        obs, got, terminated, truncated, info = env.step(action)
        np.testing.assert_allclose(obs, [*own, *shown], rtol=1e-6, err_msg=f"step {i}")
        assert (got, terminated, truncated) == (reward, i == 14, False), f"step {i}"
        infos.append(info)
    assert infos[3] == {f"{AMAGO_ENV_LOG_PREFIX} Trial 0 Return": 2.0}
    assert infos[9] == {f"{AMAGO_ENV_LOG_PREFIX} Trial 1 Return": 1.0}
    assert infos[14] == {f"{AMAGO_ENV_LOG_PREFIX} Doors Opened": 1.0, f"{AMAGO_ENV_LOG_PREFIX} Keys Found": 3.0}
    assert all(not info for i, info in enumerate(infos) if i not in (3, 9, 14))
