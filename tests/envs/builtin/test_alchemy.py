"""Symbolic Alchemy against the paper's counts and scores and a slow model of its rules."""

import itertools
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_inside import run_example
from support.alchemy import AlchemyByColour, AlchemyOracle, AlchemyRandomHeuristic, AlchemyShaping
from tiny import rows

from amago.envs.builtin import SymbolicAlchemy
from amago.envs.builtin.alchemy import VALUES, Chemistry, appearances, colour_meanings, graphs
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX


def log_key(name: str) -> str:
    return f"{AMAGO_ENV_LOG_PREFIX} {name}"


def play(env: SymbolicAlchemy, policy: Any, seed: int | None = None) -> float:
    """The return of a rollout."""
    env.reset(seed=seed)
    total, done = 0.0, False
    while not done:
        _, reward, done, _, _ = env.step(policy.act(env))
        total += reward
    return total


def test_there_are_as_many_chemistries_as_the_paper_counts() -> None:
    assert (len(graphs()), len(colour_meanings()), len(appearances())) == (109, 48, 32)
    assert len(graphs()) * len(colour_meanings()) * len(appearances()) == 167_424
    effects = {Chemistry.of(g, m, 0).effects for g, m in itertools.product(range(109), range(48))}
    assert len(effects) == 109 * 48  # no two of them act alike
    looks = {look.tobytes() for look in appearances()}
    assert len(looks) == 32


def shown(env: SymbolicAlchemy) -> np.ndarray:
    """The observation, from the properties alone."""
    out: list[float] = []
    for corner in env.stones:
        if corner is None:
            out += [0, 0, 0, 0, 1]
        else:
            worth = {-3: -1, -1: -1 / 3, 1: 1 / 3, 15: 1}[VALUES[corner]]
            out += [*appearances()[env.chemistry.appearance][corner].tolist(), worth, 0]
    for colour in env.potions:
        out += [0, 1] if colour is None else [-1 + 0.4 * colour, 0]
    return np.array(out, dtype=np.float32)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1), trials=st.integers(1, 3), steps=st.integers(1, 25),
    actions=st.lists(st.integers(0, 39), min_size=75, max_size=75),
)  # fmt: skip
def test_steps_follow_the_rules(seed: int, trials: int, steps: int, actions: list[int]) -> None:
    env = SymbolicAlchemy(trials, steps)
    obs, info = env.reset(seed=seed)
    assert (info, env.horizon) == ({}, trials * steps)
    chemistry = env.chemistry
    graph, meaning = graphs()[chemistry.graph], colour_meanings()[chemistry.meaning]
    total, paid, used, best, of_trial, logged = 0.0, 0, 0, 0, 0.0, 0.0
    for t, action in enumerate(actions[: env.horizon]):
        assert (env.trial, env.steps_left) == (t // steps, steps - t % steps)
        np.testing.assert_allclose(obs, shown(env), atol=1e-6)
        stones, potions = list(env.stones), list(env.potions)
        expected = 0.0
        stone, target = divmod(action - 1, 13)
        if action > 0 and stones[stone] is not None:
            if target == 0:
                expected, stones[stone] = float(VALUES[stones[stone]]), None
                paid += 1
                best += expected == 15
            elif potions[target - 1] is not None:
                bit, setting = divmod(meaning[potions[target - 1]], 2)
                needed = graph.constraints[bit]
                if all(stones[stone] >> other & 1 == value for other, value in needed):
                    stones[stone] = (stones[stone] & ~(1 << bit)) | setting << bit
                potions[target - 1] = None
                used += 1
        obs, reward, terminated, _, info = env.step(action)
        total, of_trial = total + reward, of_trial + reward
        assert reward == expected
        assert terminated is (t + 1 == trials * steps)
        assert env.chemistry is chemistry
        if (t + 1) % steps:
            assert info == {}
        else:
            assert info.pop(log_key(f"Trial {t // steps} Return")) == of_trial
            logged, of_trial = logged + of_trial, 0.0
            if not terminated:
                assert info == {}
                assert None not in env.stones + env.potions
        if (t + 1) % steps or terminated:
            assert (list(env.stones), list(env.potions)) == (stones, potions)
    if terminated:
        assert info == {log_key("Best Stones"): best, log_key("Stones In Cauldron"): paid, log_key("Potions Used"): used}
        assert (logged, (env.trial, env.steps_left)) == (total, (trials, 0))
        with pytest.raises(gym.error.ResetNeeded):
            env.step(0)


# the paper's scores of these two, with their standard errors
PAPER = {"oracle": (288.5, 1.5), "heuristic": (145.7, 1.5)}


@pytest.mark.parametrize(("name", "policy"), [("oracle", AlchemyOracle()), ("heuristic", AlchemyRandomHeuristic(0))])
def test_scores_are_those_of_the_paper(name: str, policy: Any) -> None:
    env = SymbolicAlchemy()
    returns = [play(env, policy, seed) for seed in range(400)]
    mean, error = float(np.mean(returns)), float(np.std(returns)) / len(returns) ** 0.5
    published, its_error = PAPER[name]
    assert 1.6 < error < 3.2  # the spread of episodes is the paper's too
    assert abs(mean - published) < 3 * float(np.hypot(error, its_error)), f"{mean:.1f} +- {error:.1f}"


def in_words(env: SymbolicAlchemy, corner: int | None) -> list[int]:
    """What the view says of a stone, from the state of the environment."""
    if corner is None:
        return [0] * 13 + [1]
    looks = appearances()[env.chemistry.appearance][corner].astype(int)
    row = [int(look == kind) for look in looks for kind in (-1, 0, 1)]
    return row + [int(VALUES[corner] == worth) for worth in (-3, -1, 1, 15)] + [0]


@given(seed=st.integers(0, 10_000), trials=st.integers(1, 3), steps=st.integers(1, 25))
@settings(max_examples=25, deadline=None)
def test_the_view_by_colour_says_what_is_there_and_what_happened(seed: int, trials: int, steps: int) -> None:
    env = AlchemyByColour(SymbolicAlchemy(trials, steps))
    game, rng = env.alchemy, np.random.default_rng(seed)
    seen, _ = env.reset(seed=seed)
    dip: list[int] = [0] * 45
    done = False
    while True:
        assert env.observation_space.contains(seen)
        have = [sum(potion == colour for potion in game.potions) for colour in range(6)]
        clock = [int(game.steps_left == n) for n in range(1, steps + 1)]
        stones = [number for corner in game.stones for number in in_words(game, corner)]
        expected = [*stones, *(int(n > 0) for n in have), *(n / 12 for n in have), *clock, *dip]
        np.testing.assert_allclose(seen["observation"], expected, atol=1e-6)
        legal = [1] + [int(s is not None and n > 0) for s in game.stones for n in (1, *have)]
        assert seen["action_mask"].tolist() == legal
        if done:
            break
        action = int(rng.integers(22))
        stone, target = divmod(action - 1, 7)
        before = game.stones[stone] if action else None
        dips = action > 0 and target > 0 and before is not None and have[target - 1] > 0
        raw = game.stones, game.potions, game.trial
        seen, reward, done, _, _ = env.step(action)
        assert legal[action] or raw == (game.stones, game.potions, raw[2]) or game.trial > raw[2], "the mask hides nothing"
        paid = action > 0 and target == 0 and before is not None
        assert reward == (VALUES[before] if paid and before is not None else 0)
        dip = [0] * 45
        if dips and 0 < game.steps_left < steps:
            after = in_words(game, game.stones[stone])[:13]
            gain = VALUES[game.stones[stone]] - VALUES[before]  # type: ignore[index]
            outcome = [[gain < 0, gain == 0, gain > 0] if colour == target - 1 else [0] * 3 for colour in range(6)]
            dip = [1, *(int(o) for of_colour in outcome for o in of_colour), *in_words(game, before)[:13], *after]


@given(seed=st.integers(0, 10_000), trials=st.integers(1, 3), steps=st.integers(1, 25), discount=st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_shaping_leaves_the_discounted_return_of_every_rollout(seed: int, trials: int, steps: int, discount: float) -> None:
    game, shaped = (
        AlchemyByColour(SymbolicAlchemy(trials, steps)),
        AlchemyShaping(AlchemyByColour(SymbolicAlchemy(trials, steps)), discount),
    )
    rng, totals, weight, done = np.random.default_rng(seed), np.zeros(2), 1.0, False
    (seen, _), (other, _) = game.reset(seed=seed), shaped.reset(seed=seed)
    while not done:
        np.testing.assert_array_equal(seen["observation"], other["observation"])
        action = int(rng.choice(np.flatnonzero(seen["action_mask"])))
        seen, reward, done, _, info = game.step(action)
        other, paid, ended, truncated, logged = shaped.step(action)
        assert (done, False, info) == (ended, truncated, logged)
        totals += weight * np.array([reward, paid])
        weight *= discount
    assert totals[1] == pytest.approx(totals[0], abs=1e-6)


def test_the_example_shapes_the_rewards_of_training_alone(tmp_path: Path) -> None:
    few = "--num_trials 3 --steps_per_trial 4 --val_interval 1"
    run_example("06_alchemy.py", tmp_path, f"{few} --view colours --shaping --configs zoo/alchemy_by_colour")
    of_the_game: dict[str, list[bool]] = {"val": [], "test": [], "rollout": []}
    for row in rows(tmp_path / "tiny"):
        trials = [value for name, value in row["values"].items() if name.startswith("Average Trial ")]
        if trials:
            total = row["values"]["Average Total Return in symbolic_alchemy"]
            of_the_game[row["section"]].append(total == pytest.approx(sum(trials)))
    assert all(of_the_game.values()), "there are rollouts of each kind"
    assert all(of_the_game["val"] + of_the_game["test"])
    assert not any(of_the_game["rollout"])
