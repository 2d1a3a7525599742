"""Targets over whole sequences, and burn-in, as a user of the agents meets them; `test_oracles` has their numbers."""

import pytest
import torch
from test_agent import AGENTS, build, make_batch

from amago.nets.traj_encoders import GRUTrajEncoder, TformerTrajEncoder


def targets_of(agent, batch, seed=0):
    """The targets (B, L, G) of a batch, as its critics' loss sees them."""
    seen = []
    observe, agent.popart.update_stats = (
        agent.popart.update_stats,
        lambda target, mask: seen.append(target[:, :, 0, :, 0].clone()),
    )
    torch.manual_seed(seed)
    agent.train()(batch)
    agent.popart.update_stats = observe
    return seen[0]


def test_targets_do_not_depend_on_padding_nor_on_what_follows_the_end():
    torch.manual_seed(0)
    agent = build("discrete", targets="tree_backup")
    batch = make_batch("discrete")
    batch.dones[:] = False
    batch.dones[0, 2] = True
    first = targets_of(agent, batch)
    other = make_batch("discrete", seed=1)
    for mine, its in ((batch.rews, other.rews), (batch.actions, other.actions)):
        mine[0, 3:] = its[0, 3:]  # after termination
        mine[~batch.transition_mask[..., 0]] = its[~batch.transition_mask[..., 0]]
    second = targets_of(agent, batch)
    torch.testing.assert_close(second[0, :3], first[0, :3])
    torch.testing.assert_close(second[1:][batch.transition_mask[1:, :, 0]], first[1:][batch.transition_mask[1:, :, 0]])
    assert not torch.allclose(second[0, 3], first[0, 3])


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
