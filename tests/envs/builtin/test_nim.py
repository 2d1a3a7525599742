"""`Nim`: its rules, its best play, its rewards, and an agent that learns it."""

import itertools
from functools import cache

import gymnasium as gym
import numpy as np
import pytest
from messages import naming
from support.nim import Nim


@cache
def can_win(left: tuple[int, ...], max_take: int) -> bool:
    return any(not can_win(after, max_take) for after in moves(left, max_take))


def moves(left: tuple[int, ...], max_take: int) -> list[tuple[int, ...]]:
    return [(*left[:i], left[i] - k, *left[i + 1 :]) for i in range(len(left)) for k in range(1, max_take + 1) if left[i] >= k]


@pytest.mark.parametrize("max_take", [1, 2, 3, 5])
def test_nim_knows_its_winning_moves(max_take: int) -> None:
    game = Nim(heaps=(3, 4, 5), max_take=max_take)
    for left in itertools.product(range(4), range(5), range(6)):
        game.left = np.array(left)
        legal, after = np.flatnonzero(game.legal()), moves(left, max_take)
        assert len(legal) == len(after)
        assert game.winning().tolist() == [action for action, rest in zip(legal, after) if not can_win(rest, max_take)]


def test_nim_rewards_and_ends() -> None:
    game = Nim(heaps=(2,), max_take=2, opponent_skill=1.0)
    results = set()
    for seed in range(20):
        obs, _ = game.reset(seed=seed)
        assert obs["action_mask"].tolist() == [1, int(game.left[0] == 2)]
        assert obs["heaps"].tolist() == [game.left[0] / 2]
        last = int(game.left[0]) == 1
        obs, reward, terminated, truncated, info = game.step(0)
        assert (reward, terminated, truncated) == (1.0 if last else -1.0, True, False)
        assert info == {"AMAGO_LOG_METRIC Won": float(last), "AMAGO_LOG_METRIC Illegal Move": 0.0}
        assert not obs["action_mask"].any()
        results.add(reward)
    assert results == {1.0, -1.0}
    game.left = np.array([1])
    *_, reward, terminated, _, info = game.step(1)
    assert (reward, terminated, info["AMAGO_LOG_METRIC Illegal Move"], game.illegal_moves) == (-1.0, True, 1.0, 1)
    with pytest.raises(gym.error.ResetNeeded, match=naming("Nim.step")):
        game.step(0)
    strict = Nim(heaps=(1,), raise_if_illegal=True, render_mode="ansi")
    strict.reset(seed=0)
    assert strict.render() == "| "
    with pytest.raises(ValueError, match=naming("action", 2, 3, 1)):
        strict.step(2)
