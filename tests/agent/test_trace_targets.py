"""Losses over sequences, as a user meets them: targets, burn-in, the last state, padding; `test_oracles` has their numbers."""

from dataclasses import replace

import pytest
import torch
from test_agent import AGENTS, SPACES, build, make_batch

from amago import config
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, MambaTrajEncoder, TformerTrajEncoder


def losses_by_step(agent, batch):
    """Whether each transition has a part in the actor's and in the critics' loss: (B, L) each."""
    found = {}
    for name in ("actor", "critic"):
        edit = f"edit_{name}_mask"

        def keep(batch, loss, mask, name=name):
            found[name] = mask.flatten(2).any(dim=2)
            return mask

        setattr(agent, edit, keep)
    agent(batch)
    return found["actor"], found["critic"]


@pytest.mark.parametrize("name", list(AGENTS))
def test_the_first_steps_have_no_loss_unless_a_rollout_begins(name):
    agent = build("discrete", GRUTrajEncoder, agent_type=AGENTS[name], burn_in=2)
    batch = make_batch("discrete")
    batch.time_idxs = batch.time_idxs.clone()
    batch.time_idxs[0] += 30
    batch.time_idxs[2] += 3
    want = batch.transition_mask[..., 0].clone()
    want[0, :2] = want[2, :2] = False  # the third has one transition: none of it is left
    for mask in losses_by_step(agent, batch):
        assert mask.equal(want)
    assert agent.update_info["Unmasked Batch Size (in Timesteps)"] == want.sum()
    agent = build("discrete", GRUTrajEncoder, agent_type=AGENTS[name])
    for mask in losses_by_step(agent, batch):
        assert mask.equal(batch.transition_mask[..., 0])


@pytest.mark.parametrize("traj", [GRUTrajEncoder, TformerTrajEncoder])
def test_burnt_in_steps_build_the_state_and_what_they_pay_does_not_count(traj):
    torch.manual_seed(0)
    agent = build("discrete", traj, burn_in=2)
    batch = make_batch("discrete")
    batch.time_idxs = batch.time_idxs + 30

    def loss():
        torch.manual_seed(0)
        return agent.eval()(batch).item()

    before = loss()
    batch.rews[:, :2] += 5.0
    assert loss() == before
    batch.obs["observation"][:, 0] += 1.0
    assert loss() != before, "memory reads them"
    batch.rews[:, 2:] += 5.0
    assert loss() != before


LENGTH = 8  # of `build`'s agents


def full(kind="discrete", length=LENGTH):
    """Sequences of which the first fills `max_seq_len`; nothing ends."""
    batch = make_batch(kind, length=length)
    batch.dones[:] = False
    return batch


def end_of(batch, timesteps):
    """The last observations of a batch, as a batch of its own."""
    steps, transitions = slice(-timesteps, None), slice(batch.rews.shape[1] + 1 - timesteps, None)
    return replace(
        batch, obs={k: v[:, steps] for k, v in batch.obs.items()}, rl2s=batch.rl2s[:, steps], rews=batch.rews[:, transitions],
        dones=batch.dones[:, transitions], actions=batch.actions[:, transitions], time_idxs=batch.time_idxs[:, steps],
        mask=batch.mask[:, steps],
    )  # fmt: skip


@pytest.mark.parametrize("traj", [GRUTrajEncoder, TformerTrajEncoder, MambaTrajEncoder, FFTrajEncoder])
@pytest.mark.parametrize("timesteps", [1, 4, 9])
def test_it_is_the_state_of_the_last_observations_alone(traj, timesteps):
    agent, batch = build("discrete", traj).train(), full()
    modes = [m.training for m in agent.modules()]
    weights, random = {k: v.clone() for k, v in agent.state_dict().items()}, torch.get_rng_state()
    found = agent.encode_end(batch, timesteps)
    assert found.requires_grad is False
    assert [m.training for m in agent.modules()] == modes
    assert torch.get_rng_state().equal(random)
    assert all(v.equal(weights[k]) for k, v in agent.state_dict().items()), "no statistics move"
    expected = agent.eval().encode(end_of(batch, timesteps))[:, -1:]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", list(AGENTS))
@pytest.mark.parametrize("kind", list(SPACES))
def test_only_targets_that_rest_on_the_last_state_change(name, kind):
    config.bind({"FFTstepEncoder.normalize_inputs": False})
    batch, found = full(kind), []
    for context in (None, 3):
        torch.manual_seed(0)
        agent = build(kind, GRUTrajEncoder, agent_type=AGENTS[name], bootstrap_context=context, n_step=2)
        agent.popart.update_stats = lambda target, mask: found.append(target[:, :, 0, :, 0].clone())  # (B, L, G)
        torch.manual_seed(0)
        agent.train()(batch)
    assert found[0][0, :-2].equal(found[1][0, :-2])
    assert (found[0][0, -2:] != found[1][0, -2:]).all()
    for row, length in ((1, LENGTH - 2), (2, 1)):  # shorter ones
        assert found[0][row, :length].equal(found[1][row, :length])


OF_THE_POLICY = {
    "discrete": ("Policy Entropy", lambda pi: pi.entropy()),
    "continuous": ("Policy Std (before tanh)", lambda pi: pi.scale),
    "multibinary": ("Policy Entropy", lambda pi: pi.entropy().sum(-1)),
}


@pytest.mark.parametrize("kind", SPACES)
def test_metrics_of_the_policy_are_those_of_real_steps(kind):
    torch.manual_seed(0)
    agent, batch = build(kind).eval(), make_batch(kind)
    agent.actor.base.out_layer.weight.data *= 40.0  # else all states have nearly the same policy
    name, of = OF_THE_POLICY[kind]
    everywhere = of(agent.actor(agent.encode(batch)[:, :-1]))
    expected = everywhere[batch.transition_mask.squeeze(-1)].mean()
    assert not torch.isclose(expected, everywhere.mean(), rtol=1e-3), "padding makes no difference here"
    agent(batch, log_step=True)
    torch.testing.assert_close(agent.update_info[name], expected)


class BothWays(TformerTrajEncoder):
    def __init__(self, *args, **options):
        super().__init__(*args, **options, causal=False)


def test_states_of_a_model_that_sees_the_future_do_not_depend_on_padding():
    torch.manual_seed(2)
    agent, batch = build("discrete", traj=BothWays).eval(), make_batch("discrete")
    before = agent.encode(batch)
    real = batch.mask.squeeze(-1)
    batch.obs["observation"][~real] = 100.0
    torch.testing.assert_close(agent.encode(batch)[real], before[real])
