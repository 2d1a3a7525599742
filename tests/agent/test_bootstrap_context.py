"""The value at the end of a sequence that fills `max_seq_len`, from a state that remembers fewer observations."""

from dataclasses import replace

import pytest
import torch
from test_agent import AGENTS, SPACES, build, make_batch
from test_trace_targets import targets_of

from amago import config
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, MambaTrajEncoder, TformerTrajEncoder

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
        found.append(targets_of(agent, batch))
    assert found[0][0, :-2].equal(found[1][0, :-2])
    assert (found[0][0, -2:] != found[1][0, -2:]).all()
    for row, length in ((1, LENGTH - 2), (2, 1)):  # shorter ones
        assert found[0][row, :length].equal(found[1][row, :length])
