"""Whole agents against a trusted implementation: loss, gradient norms, PopArt after one update."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from golden import load

from amago import config, ops
from amago.agent import Agent, MultiTaskAgent, exp_filter
from amago.loading import Batch
from amago.nets.traj_encoders import TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.policy.original import adapt_weights
from amago.run.update import weighted_losses

TINY = {
    "FFTstepEncoder.n_layers": 1,
    "FFTstepEncoder.d_hidden": 16,
    "FFTstepEncoder.d_output": 12,
    "TformerTrajEncoder.d_model": 16,
    "TformerTrajEncoder.n_heads": 4,
    "TformerTrajEncoder.d_ff": 32,
    "TformerTrajEncoder.n_layers": 2,
    "TformerTrajEncoder.dropout_ff": 0.0,
    "TformerTrajEncoder.dropout_emb": 0.0,
    "Actor.n_layers": 2,
    "Actor.d_hidden": 16,
    "NCritics.n_layers": 2,
    "NCritics.d_hidden": 16,
    "NCriticsTwoHot.n_layers": 2,
    "NCriticsTwoHot.d_hidden": 16,
    "NCriticsTwoHot.min_return": -100.0,
    "NCriticsTwoHot.max_return": 500.0,
    "NCriticsTwoHot.output_bins": 32,
    "Multigammas.discrete": [0.5, 0.9],
}
CASES = {
    "agent_discrete": (Agent, {}, {}),
    "agent_discrete_nstep3": (Agent, {"n_step": 3, "offline_coeff": 1.0, "fbc_filter_func": exp_filter}, {}),
    "multitask_discrete": (MultiTaskAgent, {}, {"Discrete.clip_prob_low": 1e-6, "Discrete.clip_prob_high": 1.0}),
}


def golden_agent(name):
    arrays, weights, _ = load(name)
    agent_type, options, bindings = CASES[name]
    config.bind(TINY | bindings)
    agent = agent_type(
        obs_space=gym.spaces.Dict({"observation": gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)}),
        rl2_space=gym.spaces.Box(-np.inf, np.inf, (5,), np.float32),
        action_space=gym.spaces.Discrete(4),
        max_seq_len=8,
        tstep_encoder_type=FFTstepEncoder,
        traj_encoder_type=TformerTrajEncoder,
        num_critics=1,
        **options,
    )
    theirs = {k: torch.as_tensor(v) for k, v in weights.items()}
    agent.load_state_dict(adapt_weights(theirs, agent), strict=True)
    a = {k: torch.as_tensor(v) for k, v in arrays.items()}
    batch = Batch(
        obs={"observation": a["batch/observation"]}, rl2s=a["batch/rl2s"], rews=a["batch/rews"], dones=a["batch/dones"],
        actions=a["batch/actions"], time_idxs=a["batch/time_idxs"], mask=a["mask"],
    )  # fmt: skip
    return agent.train(), batch, a


def total_loss(agent, batch):
    loss = agent(batch)
    pad = batch.transition_mask[:, :, None]
    means = weighted_losses(loss, batch, pad.expand_as(loss.actor_loss), pad[:, :, None].expand_as(loss.critic_loss))
    return means["Actor Loss"] + 10.0 * means["Critic Loss"], means


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_popart(name):
    agent, batch, a = golden_agent(name)
    loss, means = total_loss(agent, batch)
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
        close(getattr(agent.popart, stat), a[f"popart_after/{stat}"], f"popart {stat}")


@pytest.mark.parametrize("name", CASES)
def test_padding_changes_nothing(name):
    agent, batch, a = golden_agent(name)
    real, transition = batch.mask, batch.transition_mask
    for x, mask in (
        (batch.obs["observation"], real), (batch.rl2s, real), (batch.rews, transition), (batch.actions, transition),
    ):  # fmt: skip
        x[~mask.expand_as(x)] = 1e6
    loss, _ = total_loss(agent, batch)
    torch.testing.assert_close(loss, a["loss"], rtol=1e-4, atol=1e-5)
