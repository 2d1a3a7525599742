"""Padding is not seen, not counted and not logged; critics do not follow the actor's loss."""

import pytest
import torch
from test_agent import AGENTS, SPACES, build, make_batch
from torch.distributions import Categorical

from amago import Agent
from amago.nets.actor_critic import NCriticsTwoHot
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
    agent(batch, log_step=True)
    torch.testing.assert_close(agent.update_info[name], expected)


class Scaled(NCriticsTwoHot):
    """Critics with a parameter beside the ensemble."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, state, action, log_dict=None):
        return Categorical(logits=self.scale * super().forward(state, action, log_dict).logits)


def test_no_parameter_of_critics_follows_the_actors_loss():
    agent = build("continuous", agent_type=AGENTS["multitask"], critic_type=Scaled, online_coeff=1.0)
    agent.losses(make_batch("continuous"))["actor"].mean().backward()
    assert all(p.grad is None for p in agent.critics.parameters())


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
