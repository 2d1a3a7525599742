"""Critics whose networks' outputs stay near 1 where returns are large or small."""

import gymnasium as gym
import pytest
import torch

from amago import config
from amago.agent import Agent, MultiTaskAgent
from amago.loading import Batch
from amago.nets.actor_critic import NCritics
from amago.nets.heads import BaseCriticHead
from amago.nets.traj_encoders import FFTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.spaces import action_spec, rl2_space

OBS = gym.spaces.Dict({"observation": gym.spaces.Box(-1, 1, (1,))})
SMALL = {
    "FFTstepEncoder.n_layers": 1, "FFTstepEncoder.d_hidden": 32, "FFTstepEncoder.d_output": 32, "FFTrajEncoder.d_model": 32,
    "FFTstepEncoder.normalize_inputs": False, "FFTrajEncoder.d_ff": 32, "FFTrajEncoder.n_layers": 1, "Actor.d_hidden": 32,
    "NCritics.d_hidden": 32,
}  # fmt: skip
CHOICES, NUMBERS = gym.spaces.Discrete(2), gym.spaces.Box(-1, 1, (1,))


def make(space=CHOICES, agent_type=Agent, **options):
    config.bind(SMALL)
    torch.manual_seed(0)
    rl2 = rl2_space(action_spec(space))
    return agent_type(OBS, rl2, space, 1, FFTstepEncoder, FFTrajEncoder, num_critics=2, tau=0.05, **options)


def two_sides(generator, base, space=CHOICES, b=64, unit=1.0):
    """Rollouts of one step, which pay ``base``, and ``unit`` more if the action is on the side of the observation."""
    x = torch.rand(b, generator=generator) * 2 - 1
    a = torch.rand(b, generator=generator) * 2 - 1
    actions = (a > 0).long() if space == CHOICES else a
    obs = torch.stack((x, x), dim=1)[..., None]
    rews = base + unit * ((a > 0) == (x > 0)).float()
    return Batch(
        {"observation": obs}, torch.zeros(b, 2, 1 + (2 if space == CHOICES else 1)), rews[:, None, None], torch.ones(b, 1, 1) > 0,
        actions[:, None, None], torch.arange(2)[None, :, None].expand(b, -1, -1), torch.ones(b, 2, 1) > 0,
    )  # fmt: skip


def update(agent, optimizer, batch):
    optimizer.zero_grad()
    loss = agent.losses(batch)
    (loss.actor_loss.mean() + 10.0 * loss.critic_loss.mean()).backward()
    optimizer.step()
    agent.soft_sync_targets()


def trained(base, updates, space=CHOICES, lr=6e-4, unit=1.0, **options):
    agent, g = make(space, **options), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(agent.trainable_params, lr=lr)
    for _ in range(updates):
        update(agent, optimizer, two_sides(g, base, space, unit=unit))
    return agent.eval()


def share_of_right_choices(agent):
    batch = two_sides(torch.Generator().manual_seed(1), 0.0, b=256)
    with torch.no_grad():
        probs = agent.actor(agent.encode(batch)[:, 0]).probs[:, -1]
    right = (batch.obs["observation"][:, 0, 0] > 0).long()
    return probs.gather(1, right[:, None]).mean().item()


@pytest.mark.learning
def test_choices_are_told_apart_where_returns_are_large():
    """A difference of 1 between returns of -100."""
    options = {"lr": 3e-3, "use_multigamma": False}
    assert share_of_right_choices(trained(-100.0, 600, rescale_critics=True, **options)) > 0.8
    assert share_of_right_choices(trained(-100.0, 600, **options)) < 0.6


@pytest.mark.parametrize("space", [CHOICES, NUMBERS], ids=["choices", "numbers"])
def test_values_are_the_same_to_the_bit_when_the_scale_grows(space):
    agent = make(space, rescale_critics=True)
    batch = two_sides(torch.Generator().manual_seed(0), 0.0, space)
    agent.eval()
    torch.manual_seed(1)
    before = agent.get_values(batch)
    weight = agent.critics.net.output_layer.weight.detach().clone()
    for critics in (agent.critics, agent.target_critics):
        critics.grow_scale(torch.tensor(64.0))
    torch.manual_seed(1)
    after = agent.get_values(batch)
    assert torch.equal(before["q_sa"], after["q_sa"])
    assert torch.equal(before["v_s"], after["v_s"])
    assert torch.equal(agent.critics.net.output_layer.weight * 64.0, weight)


@pytest.mark.parametrize("space", [CHOICES, NUMBERS], ids=["choices", "numbers"])
def test_the_scale_follows_the_returns_and_values_do_not_change_units(space):
    agent = trained(-300.0, 300, space, rescale_critics=True)
    assert (
        64.0 <= agent.critics.output_scale.item() <= 512.0
    )  # returns of -3,000 with the reward multiplier, a tenth of that raw
    assert torch.equal(agent.critics.output_scale, agent.target_critics.output_scale)
    with torch.no_grad():
        q = agent.get_values(two_sides(torch.Generator().manual_seed(1), -300.0, space))["q_sa"]
    assert q.mean().item() == pytest.approx(-300.0, rel=0.05)


@pytest.mark.parametrize("space", [CHOICES, NUMBERS], ids=["choices", "numbers"])
def test_large_rewards_are_learned_as_small_ones(space):
    """Training is the same as with a smaller reward multiplier, but for the units of values."""
    options = {"use_multigamma": False, "gamma": 0.9}
    scaled = trained(-100.0, 20, space, rescale_critics=True, **options)
    scale = scaled.critics.output_scale.item()
    assert scale == 64.0
    small = trained(-100.0, 20, space, reward_multiplier=10.0 / scale, **options)
    for a, b in zip(scaled.parameters(), small.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("space", [CHOICES, NUMBERS], ids=["choices", "numbers"])
def test_small_rewards_are_learned_as_large_ones(space):
    """Training is the same to the bit as with a larger reward multiplier: all sizes are divided by one power of two."""
    options = {"use_multigamma": False, "gamma": 0.9}
    scaled = trained(0.0, 20, space, unit=1e-5, rescale_critics=True, **options)
    scale = scaled.critics.output_scale.item()
    assert scale == 2.0**-17  # rewards of 1e-5 are 1.3 times as large
    large = trained(0.0, 20, space, unit=1e-5, reward_multiplier=10.0 / scale, **options)
    for a, b in zip(scaled.parameters(), large.parameters(), strict=True):
        assert torch.equal(a, b)
    assert scaled.popart.sigma.item() == pytest.approx(scale * large.popart.sigma.item())


def test_small_rewards_whose_mean_is_zero_are_seen():
    agent, g = make(rescale_critics=True), torch.Generator().manual_seed(0)
    agent.losses(two_sides(g, -1e-3, unit=2e-3))
    assert agent.critics.output_scale.item() == agent.target_critics.output_scale.item() == 2.0**-10


def test_a_first_batch_without_rewards_leaves_the_scale():
    agent, g = make(rescale_critics=True), torch.Generator().manual_seed(0)
    agent.losses(two_sides(g, 0.0, unit=0.0))
    assert agent.critics.output_scale.item() == 1.0


def test_rewards_that_become_larger_are_followed():
    """Values keep their units when the first batch was a hundredth of what follows."""
    agent, g = make(rescale_critics=True, use_multigamma=False), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(agent.trainable_params, lr=3e-3)
    update(agent, optimizer, two_sides(g, 0.0, unit=0.01))
    assert agent.critics.output_scale.item() < 0.01
    for _ in range(300):
        update(agent, optimizer, two_sides(g, 0.0))
    assert 0.25 <= agent.critics.output_scale.item() <= 1.0
    assert share_of_right_choices(agent.eval()) > 0.8


def test_small_returns_change_nothing():
    """Where the first rewards are of size 1, training is the same to the bit until the scale grows."""
    plain, scaled = trained(0.0, 20), trained(0.0, 20, rescale_critics=True)
    assert scaled.critics.output_scale.item() == 1.0
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_scale_is_saved_and_older_states_have_none():
    agent = trained(-300.0, 30, rescale_critics=True)
    other = make(rescale_critics=True)
    other.load_state_dict(agent.state_dict())
    assert torch.equal(other.critics.output_scale, agent.critics.output_scale)
    assert agent.critics.output_scale > 1
    assert torch.equal(other.popart.least_sigma, agent.popart.least_sigma)
    other.load_state_dict(make().state_dict())
    assert other.critics.output_scale.item() == 1.0
    assert other.popart.least_sigma.item() == pytest.approx(0.01)
    assert not [name for name in make().state_dict() if "output_scale" in name or "least_sigma" in name]


class Other(BaseCriticHead):
    def __init__(self, state_dim, action_dim, discrete, gammas, num_critics=4):
        super().__init__(state_dim, action_dim, discrete, gammas, num_critics)
        self.layer = torch.nn.Linear(state_dim, len(gammas) * action_dim)


def test_agents_that_cannot_scale_say_so():
    with pytest.raises(ValueError, match=r"rescale_critics=True needs the statistics that popart=True keeps"):
        make(rescale_critics=True, popart=False)
    with pytest.raises(ValueError, match=r"rescale_critics=True .* critic_type=NCriticsTwoHot"):
        make(agent_type=MultiTaskAgent, rescale_critics=True)
    with pytest.raises(ValueError, match=r"rescale_critics=True .* critic_type=Other"):
        make(rescale_critics=True, critic_type=Other)
    assert make(rescale_critics=True, critic_type=NCritics).critics.output_scale.item() == 1.0
