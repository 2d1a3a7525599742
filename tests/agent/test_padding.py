"""Padding is not seen, not counted and not logged; critics that would follow the actor's loss are refused."""

import pytest
import torch
from test_agent import AGENTS, SPACES, build, make_batch
from torch.distributions import Categorical

from amago import Agent
from amago.nets.actor_critic import Actor, NCritics, NCriticsTwoHot
from amago.nets.traj_encoders import FFTrajEncoder, TformerTrajEncoder

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
    torch.testing.assert_close(agent.losses(batch, log_step=True).metrics[name], expected)


def test_a_batch_without_a_real_step_has_no_metrics_of_the_policy():
    agent, batch = build("discrete"), make_batch("discrete")
    batch.mask[:] = False
    assert "Policy Entropy" not in agent.losses(batch, log_step=True).metrics


class OwnForward(Actor):
    """A user's actor whose `forward` has no mask."""

    def forward(self, state, log_dict=None, straight_from_obs=None):
        return super().forward(state, log_dict, straight_from_obs)


def test_an_actor_that_takes_no_mask_logs_all_steps():
    agent = build("discrete", actor_type=OwnForward)
    assert "Policy Entropy" in agent.losses(make_batch("discrete"), log_step=True).metrics


class Deaf(NCritics):
    """Critics of a user who did not read what `detach_params` is for."""

    def forward(self, state, action, log_dict=None, detach_params=False):
        return super().forward(state, action, log_dict)


class HalfDeaf(NCriticsTwoHot):
    """Critics that detach all but a parameter of their own."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, state, action, log_dict=None, detach_params=False):
        return Categorical(logits=self.scale * super().forward(state, action, log_dict, detach_params).logits)


CRITICS = {"agent": Deaf, "multitask": HalfDeaf}


@pytest.mark.parametrize("kind", ["continuous", "multibinary"])
@pytest.mark.parametrize("name", AGENTS)
def test_critics_that_would_follow_the_actors_loss_are_refused(name, kind):
    cls = CRITICS[name]
    with pytest.raises(ValueError, match=f"critic_type={cls.__name__} ignores detach_params=True"):
        build(kind, agent_type=AGENTS[name], critic_type=cls, online_coeff=1.0)
    build(kind, agent_type=AGENTS[name], critic_type=cls, online_coeff=0.0, offline_coeff=1.0)  # no such loss


def test_the_check_leaves_no_trace():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    agent = build("continuous")
    agent._check_critics_detach()
    torch.set_rng_state(before)
    after = build("continuous")
    assert all(p.grad is None for p in agent.parameters())
    assert all(m.training for m in agent.modules())
    for (name, p), q in zip(agent.named_parameters(), after.parameters(), strict=True):
        assert p.equal(q), name


class BothWays(TformerTrajEncoder):
    def __init__(self, *args, **options):
        super().__init__(*args, **options, causal=False)


class Forgetful(FFTrajEncoder):
    """A user's model whose `forward` has no mask."""

    def forward(self, seq, time_idxs, hidden_state=None, log_dict=None):
        return super().forward(seq, time_idxs, hidden_state, log_dict)


def test_states_of_a_model_that_sees_the_future_do_not_depend_on_padding():
    torch.manual_seed(2)
    agent, batch = build("discrete", traj=BothWays).eval(), make_batch("discrete")
    before = agent.encode(batch)
    real = batch.mask.squeeze(-1)
    batch.obs["observation"][~real] = 100.0
    torch.testing.assert_close(agent.encode(batch)[real], before[real])
    assert not Forgetful.takes_mask
    assert torch.isfinite(Agent.encode(build("discrete", traj=Forgetful), batch)).all()
