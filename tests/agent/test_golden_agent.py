"""Whole agents against a trusted implementation: loss, gradient norms, PopArt after one update."""

import pytest
import torch
from golden_agents import CASES, golden_agent

from amago import ops


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_popart(name):
    agent, batch, a = golden_agent(name)
    loss, means = agent(batch), agent.update_info
    loss.backward()

    def close(got, want, what):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda m: f"{what}: {m}")

    close(means["Actor Loss"], a["actor_loss"], "actor loss")
    close(means["Critic Loss"], a["critic_loss"], "critic loss")
    close(loss, a["loss"], "loss")
    for part in ("tstep_encoder", "traj_encoder", "actor", "critics"):
        grads = [p.grad for p in getattr(agent, part).parameters() if p.grad is not None]
        close(ops.global_norm(grads), a[f"grad_norm/{part}"], f"gradient of {part}")
    for stat in ("mu", "nu", "w", "b"):
        close(getattr(agent.popart, stat).float(), a[f"popart_after/{stat}"], f"popart {stat}")
