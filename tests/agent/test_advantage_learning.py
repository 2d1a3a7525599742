"""Advantage learning: what it adds to targets, and what becomes of the values that are learned from them."""

import pytest
import torch
from messages import naming
from test_agent import AGENTS, SPACES, build, make_batch
from test_entropy import learned, one_step
from test_trace_targets import targets_of

from amago import Agent, config
from amago.nets.traj_encoders import GRUTrajEncoder


def pair(kind, alpha, **options):
    """The same agent without and with it, without dropout and statistics of its inputs: an observation always gives the same state."""
    config.bind({"FFTstepEncoder.normalize_inputs": False})
    agents = []
    for value in (0.0, alpha):
        torch.manual_seed(0)
        agents.append(build(kind, GRUTrajEncoder, advantage_learning=value, **options))
    return agents


@pytest.mark.parametrize(
    "options", [{}, {"n_step": 3}, {"targets": "peng"}, {"entropy_coeff": 0.5}, {"use_target_actor": False}]
)
def test_targets_gain_a_share_of_the_target_critics_advantage(options):
    batch, found = make_batch("discrete"), []
    plain, agent = pair("discrete", 0.75, num_critics=1, popart=False, **options)
    with torch.no_grad():
        for each in (plain, agent):
            for network in (each.target_actor, each.target_critics):
                for p in network.parameters():
                    p.add_(0.1)  # else the targets would be the trained ones
            found.append(targets_of(each, batch))
        state = agent.encode(batch)[:, :-1]
        q = agent.target_critics.all_values(state)[:, :, 0].double()  # (B, L, G, A)
        actor = agent.actor if options.get("use_target_actor") is False else agent.target_actor
        probs = agent._policy(actor, state, {}).probs.double()
    taken = agent.actor.policy_dist.action_from_buffer(batch.actions).double()[:, :, None]  # clipped as probabilities are
    expected = 0.75 * ((q * taken).sum(-1) - (q * probs).sum(-1))
    real = batch.transition_mask[..., 0]
    gained = (found[1] - found[0]).double()[real]
    torch.testing.assert_close(gained, expected[real], atol=2e-5, rtol=2e-5)
    assert gained.abs().max() > 1e-3


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_differences_between_actions_grow_and_the_value_of_the_policy_stays(alpha):
    """A bandit: Q(a) = V + (r(a) - V) / (1 - alpha), where V is the mean of r over actions of the policy."""
    rewards = torch.tensor([0.0, 0.3, 0.6, 1.0])
    options = {"advantage_learning": alpha, "entropy_coeff": 0.5 / (1 - alpha), "reward_multiplier": 1.0}
    agent, pi = learned(SPACES["discrete"], lambda a: a @ rewards, 900, **options)
    probs = pi.probs[0, 0, -1]
    assert probs.max() < 0.9, "a policy that does all"
    value = probs @ rewards
    with torch.no_grad():
        state = agent.encode(one_step(SPACES["discrete"], lambda a: a @ rewards))[:1, :1]
        out = agent.critics.all_values(state)  # (1, 1, C, G, A)
        q = torch.cat([agent.values.returns(out[..., a : a + 1]) for a in range(4)], dim=-1)[0, 0, :, -1].mean(dim=0)
    torch.testing.assert_close(q @ probs, value, atol=0.06, rtol=0.0)
    torch.testing.assert_close(q - q @ probs, (rewards - value) / (1 - alpha), atol=0.15, rtol=0.1)


@pytest.mark.parametrize("kind", list(SPACES))
@pytest.mark.parametrize("name", list(AGENTS))
def test_every_agent_and_action_can_have_it(name, kind):
    torch.manual_seed(0)
    agent = build(kind, agent_type=AGENTS[name], advantage_learning=0.9).train()
    agent(make_batch(kind)).backward()
    assert torch.isfinite(agent.update_info["Critic Loss"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"advantage_learning": 1.0}, ("advantage_learning=1.0", "[0, 1)")),
        ({"advantage_learning": -0.1}, ("advantage_learning=-0.1",)),
        ({"advantage_learning": 0.5, "expectile": 0.7, "online_coeff": 0.0}, ("expectile=0.7", "advantage_learning=0.5")),
    ],
)
def test_what_contradicts_it_is_refused(options, words):
    with pytest.raises(ValueError, match=naming(*words)):
        build("discrete", **options)


def test_it_is_off_by_default():
    assert Agent.__init__.__signature__.parameters["advantage_learning"].default == 0.0
