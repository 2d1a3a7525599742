"""Metrics of finished rollouts."""

import numpy as np
import pytest
import tiny
import torch
from tiny import EPISODE, started

from amago.envs import EpisodeRecord, ReturnHistory, SpecialMetricHistory, make_pool
from amago.run.evaluate import AVERAGE_RETURN as TOTAL
from amago.run.evaluate import (
    AVERAGE_RETURN_OF_ROLLOUTS,
    evaluate,
    merge_returns,
    merge_specials,
    summarise,
)


def episodes():
    return [
        EpisodeRecord("b", 1.0, 5, {"Success": 1.0}),
        EpisodeRecord("a", 3.0, 5, {"Success": 0.0, "Steps": 7.0}),
        EpisodeRecord("b", 5.0, 5, {"Success": 0.0}),
    ]


def test_a_summary():
    returns, specials = merge_returns([ReturnHistory.of(episodes())]), merge_specials([SpecialMetricHistory.of(episodes())])
    assert summarise(returns, specials) == {
        TOTAL: 3.0, AVERAGE_RETURN_OF_ROLLOUTS: 3.0, "Number of Rollouts": 3.0,
        "Average Total Return in a": 3.0, "Average Total Return in b": 3.0,
        "Bottom Quintile Total Return in a": 3.0, "Bottom Quintile Total Return in b": pytest.approx(1.8),
        "Mean of Bottom Quintile Total Return in a": 3.0, "Mean of Bottom Quintile Total Return in b": 1.0,
        "Average Success in a": 0.0, "Average Success in b": 0.5, "Average Steps in a": 7.0,
    }  # fmt: skip


def test_the_mean_over_environment_names_does_not_favour_short_rollouts():
    metrics = summarise({"long": [10.0], "short": [0.0, 0.0, 0.0]}, {})
    assert (metrics[TOTAL], metrics[AVERAGE_RETURN_OF_ROLLOUTS]) == (5.0, 2.5)


def run(agent, **kwargs):
    pool = make_pool([tiny.tmaze] * 3, env_mode="sync", seed=4)
    try:
        return evaluate(agent, pool, **({"timesteps": 3 * EPISODE} | kwargs))
    finally:
        pool.close()


def test_evaluate_needs_no_experiment(tmp_path):
    e = started(tmp_path)
    agent = e.policy
    agent.train()
    metrics = run(agent)
    assert metrics["Number of Rollouts"] == 9
    assert -1.0 <= metrics[TOTAL] <= 1.0
    assert agent.training, "its mode is put back"
    assert run(agent, timesteps=100 * EPISODE, episodes=5)["Number of Rollouts"] == 5
    assert run(agent, timesteps=EPISODE - 1) == {}


def test_a_seed_repeats_an_evaluation_and_a_greedy_policy_ignores_it(tmp_path):
    agent = started(tmp_path, traj="transformer").policy
    assert run(agent, seed=1) == run(agent, seed=1)
    assert len({run(agent, seed=s, timesteps=10 * EPISODE)[TOTAL] for s in range(5)}) > 1
    assert run(agent, seed=1, sample=False) == run(agent, seed=2, sample=False)


def test_the_agent_of_the_environment_is_measured(tmp_path):
    """An agent with known actions has the return that the environment gives for them."""
    agent = started(tmp_path).policy
    agent.act = lambda state, obs, sample, gamma_idx=None: torch.zeros(len(state), 1, dtype=torch.int64)  # always right
    metrics = run(agent)
    assert metrics["Bottom Quintile Total Return in TMaze"] == pytest.approx(0.0, abs=1e-6)
    assert np.isclose(metrics[TOTAL], 0.0), "walks to the junction without penalty, and never turns to the goal"
