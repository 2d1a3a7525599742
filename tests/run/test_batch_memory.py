"""A batch that cannot fit into memory is refused before it is allocated."""

import numpy as np
import pytest
import tiny
import torch
from messages import naming

from amago.run import batch_memory
from amago.run.batch_memory import BatchTooLargeError, bytes_of_step


@pytest.mark.parametrize("traj", ["ff", "gru", "transformer"])
def test_an_absurd_batch_is_refused_with_figures_and_the_argument_to_lower(tmp_path, traj):
    e = tiny.started(tmp_path, traj=traj, batch_size=10**12)
    with pytest.raises(BatchTooLargeError, match=naming("batch_size", 10**12, "max_seq_len", tiny.EPISODE, "GiB", "available")):
        e.learn()


def test_a_batch_size_that_is_advised_is_taken(tmp_path, monkeypatch):
    e = tiny.started(tmp_path, batch_size=500)
    each = sum(bytes_of_step(e.policy)) * (tiny.EPISODE + 1)
    monkeypatch.setattr(batch_memory, "available_memory", lambda: 40 * each)
    with pytest.raises(BatchTooLargeError, match=naming("batch_size=40 or less")):
        e.learn()
    tiny.learned(tmp_path, name="b", batch_size=40).close()
    monkeypatch.setattr(batch_memory, "available_memory", lambda: None)  # not known: no refusal
    tiny.learned(tmp_path, name="c", batch_size=50).close()


def test_short_rollouts_do_not_count_as_long_ones_and_bits_stay(tmp_path, monkeypatch):
    fields = {"max_seq_len": 10_000, "batch_size": 8}
    a = tiny.learned(tmp_path, name="a", **fields)
    limit = 8 * sum(bytes_of_step(a.policy)) * (tiny.EPISODE + 1)
    monkeypatch.setattr(batch_memory, "available_memory", lambda: limit)
    b = tiny.learned(tmp_path, name="b", **fields)
    assert b.updater.grad_steps == 2
    assert tiny.differing(tiny.weights(a), tiny.weights(b)) == []


@pytest.mark.parametrize("traj", ["ff", "gru", "transformer"])
def test_the_estimate_is_a_lower_bound_and_not_far_off(tmp_path, traj):
    e = tiny.learned(tmp_path, traj=traj)
    batch = e.train_dloader.draw(0)
    steps = batch.mask.numel()
    data, _ = bytes_of_step(e.policy)
    tensors = [*batch.obs.values(), batch.rl2s, batch.time_idxs, batch.mask, batch.rews, batch.dones, batch.actions]
    real = sum(t.numel() * t.element_size() for t in tensors)
    assert 0.5 * real <= data * steps <= 1.3 * real

    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if not isinstance(t, torch.nn.Parameter):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    e.policy.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = e.policy.losses(batch, False)
        losses = loss.actor_loss.sum() + loss.critic_loss.sum()
    assert np.isfinite(losses.item())
    assert bytes_of_step(e.policy)[1] * steps <= sum(kept.values())
