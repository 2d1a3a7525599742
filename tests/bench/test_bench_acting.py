"""The benchmarks of acting run, and their parts measure what they say."""

import numpy as np
import pytest
import torch

TRAJ = ("FF", "GRU", "Transformer")


def test_policy_step(smoke):
    rows = smoke("policy_step")
    assert list(rows) == [f"{traj}, 4 actors" for traj in TRAJ]
    assert all(row["unit"] == "ms" and row["target"] == 0.4 and row["peer"] is None for row in rows.values())


def test_rollout(smoke):
    rows = smoke("rollout")
    models = ("FF", "GRU", "Transformer 32", "Transformer 512")
    expected = {
        f"{env}, {model}, {mode}, 4 actors" for env in ("CartPole", "images") for model in models for mode in ("sync", "async")
    }
    alone = {f"{env}, environments alone, async, 4 actors" for env in ("CartPole", "images")}
    recorded = {f"{env}, Transformer, recorded, async, 4 actors" for env in ("CartPole", "images")}
    assert rows.keys() == expected | alone | recorded
    assert all((row["peer"] is not None) == (case in alone) for case, row in rows.items()), "Gymnasium's AsyncVectorEnv"
    assert all(("x sync" in row["note"]) == ("async" in case and case in expected) for case, row in rows.items())


def test_only_some_cases(smoke):
    assert list(smoke("rollout", "--only", "CartPole, FF, sync")) == ["CartPole, FF, sync, 4 actors"]


def test_context(smoke):
    rows = smoke("context")
    fills = [
        f"context {n}, {fill}, {dtype}"
        for n in (8, 16)
        for dtype in ("float32", "bfloat16")
        for fill in ("empty", "half full", "full")
    ]
    assert list(rows) == [*fills, "context 16, step 160 against step 24"]
    assert [case for case, row in rows.items() if row["target"] == 0.6] == ["context 16, full, float32"]
    assert all("products" in rows[case]["details"] for case in fills)


@pytest.mark.parametrize("traj", TRAJ)
def test_the_ceiling_of_a_step_multiplies_by_every_matrix(smoke, traj):
    from benchmarks.policy_step import make_agent, step_matrices

    agent, seen = make_agent(traj, 8, True), set()
    for module in (agent.tstep_encoder, agent.traj_encoder, agent.actor):
        seen |= {
            p.data_ptr()
            for name, p in module.named_parameters()
            if name.rpartition(".")[2].startswith("weight") and p.ndim == 2
        }
    assert {p.data_ptr() for p in step_matrices(agent)} == seen
    assert len(seen) == {"FF": 3 + 8 + 3, "GRU": 3 + 7 + 3, "Transformer": 3 + 13 + 3}[traj]


def test_rollouts_of_the_policy_alone_begin_at_different_steps(smoke):
    from benchmarks.policy_step import Acting, make_agent

    acting = Acting(make_agent("Transformer", 8, True), 5, episode=4)
    assert sorted(set(acting.times.tolist())) == [1, 2, 3, 4]
    lengths = [acting.memory.host_lengths.copy() for _ in range(9) if acting.step() is not None]
    assert {int(n) for row in lengths for n in row} == {1, 2, 3, 4}, "every rollout is four steps long"
    np.testing.assert_array_equal(lengths[0], lengths[4])


def test_a_memory_in_the_middle_of_a_rollout_is_as_long_as_asked(smoke):
    from benchmarks.context import Remembering
    from benchmarks.policy_step import make_agent

    steps = Remembering(make_agent("Transformer", 16, True), 3, 9, torch.bfloat16)
    assert steps.cache.keys.dtype == torch.bfloat16
    assert steps.cache.host_lengths.tolist() == steps.cache.lengths.tolist() == [9, 8, 7]
    steps.step()
    assert steps.cache.host_lengths.tolist() == [10, 9, 8]
    steps.restart()
    assert steps.cache.lengths.tolist() == [9, 8, 7]
