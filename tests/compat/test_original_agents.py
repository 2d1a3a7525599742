"""What code for the original system relies on in its agents, as such code uses it."""

import copy
import itertools

import gin
import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import nn

import amago
from amago import config
from amago.agent import Agent, BaseAgent, Multigammas, MultiTaskAgent, get_action_dim_and_type
from amago.loading import Batch
from amago.nets.actor_critic import Actor, NCritics
from amago.nets.policy_dists import DiscreteLikeContinuous
from amago.nets.traj_encoders import GRUTrajEncoder, TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder

OBS = gym.spaces.Dict({"observation": gym.spaces.Box(-9, 9, (4,)), "text": gym.spaces.Box(-9, 9, (2,))})
SPACES = {"discrete": gym.spaces.Discrete(3), "continuous": gym.spaces.Box(-1, 1, (2,)), "bits": gym.spaces.MultiBinary(5)}
WIDTHS = {"discrete": 3, "continuous": 2, "bits": 5}
B, L, G, C = 3, 6, 7, 4  # L transitions
PAD = 4.0
SMALL = {
    "FFTstepEncoder.d_hidden": 16, "FFTstepEncoder.d_output": 12, "GRUTrajEncoder.d_hidden": 16, "GRUTrajEncoder.d_output": 16,
    "GRUTrajEncoder.n_layers": 1, "TformerTrajEncoder.d_model": 16, "TformerTrajEncoder.n_heads": 2, "TformerTrajEncoder.d_ff": 32,
    "TformerTrajEncoder.n_layers": 1, "Actor.d_hidden": 16, "NCritics.d_hidden": 16, "NCriticsTwoHot.d_hidden": 16,
    "NCriticsTwoHot.output_bins": 16,
}  # fmt: skip
BOTH = pytest.mark.parametrize("agent_type", [Agent, MultiTaskAgent])
KINDS = pytest.mark.parametrize("kind", SPACES)


def build(kind="discrete", agent_type=Agent, traj=GRUTrajEncoder, **options):
    config.bind(SMALL)
    torch.manual_seed(0)
    return agent_type(
        obs_space=OBS, rl2_space=gym.spaces.Box(-np.inf, np.inf, (1 + WIDTHS[kind],)), action_space=SPACES[kind], max_seq_len=8,
        tstep_encoder_type=FFTstepEncoder, traj_encoder_type=traj, **options,
    )  # fmt: skip


def padded_batch(kind="discrete"):
    """Lengths 6, 4 and 1, padded with 4.0."""
    g = torch.Generator().manual_seed(1)
    if kind == "discrete":
        actions = F.one_hot(torch.randint(3, (B, L), generator=g), 3).float()
    elif kind == "continuous":
        actions = torch.rand(B, L, 2, generator=g) * 2 - 1
    else:
        actions = torch.randint(2, (B, L, 5), generator=g).float()
    mask = torch.arange(L + 1)[None, :, None] <= torch.tensor([6, 4, 1])[:, None, None]
    batch = Batch(
        obs={"observation": torch.randn(B, L + 1, 4, generator=g), "text": torch.randn(B, L + 1, 2, generator=g)},
        rl2s=torch.randn(B, L + 1, 1 + WIDTHS[kind], generator=g), rews=torch.randn(B, L, 1, generator=g),
        dones=torch.rand(B, L, 1, generator=g) < 0.2, actions=actions,
        time_idxs=torch.arange(L + 1)[None, :, None].repeat(B, 1, 1), mask=mask,
    )  # fmt: skip
    batch.rl2s[~mask.expand_as(batch.rl2s)] = PAD
    return batch


# ---- construction --------------------------------------------------------------------------------------------------------


def test_options_have_the_names_and_defaults_that_clients_bind():
    config.bind({"Agent.critic_loss_weight": 7.0})
    agent = build(
        num_critics=4, num_critics_td=2, online_coeff=1.0, offline_coeff=0.1, gamma=0.999, reward_multiplier=10.0, tau=0.003,
        fake_filter=False, num_actions_for_value_in_critic_loss=1, num_actions_for_value_in_actor_loss=1, popart=True,
        use_target_actor=True, use_multigamma=True, n_step=1, actor_type=Actor, critic_type=NCritics, pass_obs_keys_to_actor=None,
    )  # fmt: skip
    assert agent.critic_loss_weight == 7.0
    multi = build(agent_type=MultiTaskAgent)
    assert (multi.online_coeff, multi.offline_coeff, multi.critic_loss_weight) == (0.0, 1.0, 10.0)
    assert type(multi.critics).__name__ == "NCriticsTwoHot"


class Extended(Agent):
    """Sets its own settings before the constructor of the base class, which calls the parts."""

    def __init__(self, *args, extra_width=5, **kwargs):
        self.extra_width, self.order, self.heads = extra_width, [], []
        super().__init__(*args, **kwargs)

    def init_encoders(self):
        self.order.append("encoders")
        super().init_encoders()
        self.normalise = nn.LayerNorm(self.tstep_encoder.emb_dim)

    def init_actor_critic(self):
        self.order.append("actor_critic")
        super().init_actor_critic()

    def init_extra_networks(self):
        self.order.append("extra")
        super().init_extra_networks()
        self.predict = nn.Linear(self.state_dim, self.extra_width)

    def hard_sync_targets(self):
        self.order.append("targets")
        super().hard_sync_targets()

    @property
    def trainable_params(self):
        return itertools.chain(super().trainable_params, self.predict.parameters(), self.normalise.parameters())


def test_agents_are_built_in_parts_in_this_order():
    agent = build(agent_type=Extended, extra_width=9)
    assert agent.order == ["encoders", "actor_critic", "extra", "targets"]
    assert agent.predict.out_features == 9
    trained = {id(p) for p in agent.trainable_params}
    assert {id(p) for p in agent.predict.parameters()} < trained
    assert not trained & {id(p) for p in agent.target_critics.parameters()}


def test_heads_are_built_with_these_keywords():
    seen = {}

    class MyActor(Actor):
        def __init__(self, state_dim, action_dim, discrete, gammas, **kwargs):
            seen["actor"] = (state_dim, action_dim, discrete, len(gammas))
            super().__init__(state_dim=state_dim, action_dim=action_dim, discrete=discrete, gammas=gammas, **kwargs)

    class MyCritics(NCritics):
        def __init__(self, state_dim, action_dim, discrete, gammas, num_critics, **kwargs):
            seen["critics"] = (state_dim, action_dim, discrete, len(gammas), num_critics)
            super().__init__(state_dim, action_dim, discrete, gammas, num_critics, **kwargs)

    for kind, discrete in (("discrete", True), ("continuous", False), ("bits", False)):
        agent = build(kind, actor_type=MyActor, critic_type=MyCritics)
        assert seen == {"actor": (16, WIDTHS[kind], discrete, G), "critics": (16, WIDTHS[kind], discrete, G, C)}
        assert agent(padded_batch(kind)).isfinite()


@BOTH
def test_attributes(agent_type):
    agent = build(agent_type=agent_type, pass_obs_keys_to_actor=None)
    assert agent.gammas.tolist() == pytest.approx([*Multigammas().discrete, 0.999])
    assert (agent.discrete, agent.multibinary, agent.action_dim, agent.state_dim, agent.pad_val) == (True, False, 3, 16, PAD)
    assert (agent.obs_space, agent.action_space) == (OBS, SPACES["discrete"])
    assert agent.rl2_space.shape == (4,)
    assert (agent.num_critics, agent.num_critics_td, agent.n_step, agent.tau, agent.fake_filter) == (4, 2, 1, 0.003, False)
    assert agent.num_actions_for_value_in_critic_loss == 1
    assert agent.num_actions_for_value_in_actor_loss == (3 if agent_type is MultiTaskAgent else 1)
    assert agent.fbc_filter_func is amago.agent.binary_filter
    assert agent.pass_obs_keys_to_actor == []
    assert len(agent.critics) == len(agent.target_critics) == len(agent.maximized_critics) == 4
    for part in ("tstep_encoder", "traj_encoder", "actor", "target_actor", "popart"):
        assert isinstance(getattr(agent, part), nn.Module)
    bits = build("bits", agent_type=agent_type)
    assert (bits.discrete, bits.multibinary, bits.action_dim) == (False, True, 5)


def test_discounts_and_types_of_actions():
    both = Multigammas(discrete=[0.5], continuous=[0.7, 0.8])
    assert (both.discrete, both.continuous) == ([0.5], [0.7, 0.8])
    config.bind({"Multigammas.discrete": [0.3]})
    assert Multigammas().discrete == [0.3]
    assert get_action_dim_and_type(gym.spaces.Discrete(6)) == (6, True, False)
    assert get_action_dim_and_type(gym.spaces.Box(-1, 1, (4,))) == (4, False, False)
    assert get_action_dim_and_type(gym.spaces.MultiBinary(3)) == (3, False, True)


def test_observations_that_an_actor_would_ignore_are_told():
    with pytest.warns(UserWarning, match=r"pass_obs_keys_to_actor=\['text'\], but Actor ignores observations"):
        agent = build(pass_obs_keys_to_actor=["text"])
    assert agent.pass_obs_keys_to_actor == ["text"]


# ---- the loss ------------------------------------------------------------------------------------------------------------


@BOTH
@KINDS
def test_forward_returns_a_scalar_and_fills_update_info(agent_type, kind):
    agent, batch = build(kind, agent_type=agent_type, online_coeff=1.0, offline_coeff=1.0), padded_batch(kind)
    loss = agent(batch, log_step=True)
    first = agent.update_info
    assert loss.shape == ()
    loss.backward()
    assert all(p.grad is not None for p in agent.trainable_params)
    assert first["Sequence Length"] == L + 1
    assert first["Batch Size (in Timesteps)"] == B * L
    assert first["Unmasked Batch Size (in Timesteps)"] == 6 + 4 + 1
    torch.testing.assert_close(loss, first["Actor Loss"] + 10.0 * first["Critic Loss"])
    assert len(first) > 10
    agent(batch, log_step=False)
    assert agent.update_info is not first
    assert len(agent.update_info) < len(first)


class Auxiliary(Agent):
    """Adds to the loss and to the metrics after ``super().forward``."""

    def init_extra_networks(self):
        super().init_extra_networks()
        self.guess = nn.Parameter(torch.tensor(3.0))

    @property
    def trainable_params(self):
        return itertools.chain(super().trainable_params, [self.guess])

    def forward(self, batch, log_step):
        loss = super().forward(batch, log_step)
        extra = self.guess**2
        self.update_info["Guess"] = self.guess.detach().clone()
        return loss + extra


@pytest.mark.parametrize("weight", [None, 3.0])
def test_what_a_subclass_adds_to_the_loss_is_trained(tmp_path, weight):
    e = tiny.started(tmp_path, agent_type=Auxiliary, learning_rate=0.1, lr_warmup_steps=0, critic_loss_weight=weight)
    e.learn()
    assert float(e.policy.guess.detach()) < 3.0
    values = tiny.rows(e.run_dir, "train")[0]["values"]
    total = values["Actor Loss"] + (weight or 10.0) * values["Critic Loss"] + values["Auxiliary Loss"]
    assert values["Loss"] == pytest.approx(total, rel=1e-4)
    assert values["Guess"] == pytest.approx(3.0, abs=1.0)
    e.close()


class OwnLoss(Agent):
    """Computes its loss from the networks, as a client that overrides forward does."""

    def forward(self, batch, log_step):
        self.update_info = {}
        mask = ~(batch.rl2s == self.pad_val).all(-1, keepdim=True)
        emb = self.tstep_encoder(obs=batch.obs, rl2s=batch.rl2s, log_dict=self.update_info)
        states, _ = self.traj_encoder(seq=emb, time_idxs=batch.time_idxs, hidden_state=None, log_dict=self.update_info)
        state, state_mask = states[:, :-1], mask[:, 1:]
        dist = self.actor(state, log_dict=self.update_info, straight_from_obs={})
        actions = self.actor.policy_dist.action_from_buffer(batch.actions)
        critic_in = actions[None, :, :, None].expand(-1, -1, -1, len(self.gammas), -1)
        q = self.popart(self.critics(state, critic_in)[0], normalized=False)
        with torch.no_grad():
            values = self.target_critics(state, self._sample_k_actions(self.target_actor(state), k=2).clamp(0, 1))
            assert self._reduce_critic_ensemble(values).shape == (2, *state.shape[:2], 1, len(self.gammas), 1)
        target = batch.rews[:, :, None, None].expand_as(q[:, :, :1])
        self.popart.update_stats(target, mask=state_mask[:, :, None, :, None].expand_as(target))
        critic_loss = (self.popart.normalize_values(q) - self.popart.normalize_values(target)) ** 2
        chosen = DiscreteLikeContinuous(dist).rsample()[None]
        self._full_copy(self.maximized_critics, self.critics)
        actor_loss = -self.maximized_critics(state.detach(), chosen)[0].mean(2)
        return self._compute_loss(batch, actor_loss, critic_loss, state_mask)


def test_a_loss_written_from_the_parts():
    agent, batch = build(agent_type=OwnLoss), padded_batch()
    agent(batch, log_step=True).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in agent.trainable_params)
    assert agent.update_info["Unmasked Batch Size (in Timesteps)"] == 11
    # the policy gradient trains the actor alone
    agent.zero_grad()
    agent(batch, log_step=False)
    grads = torch.autograd.grad(agent.update_info["Actor Loss"], list(agent.critics.parameters()), allow_unused=True)
    assert all(g is None for g in grads)


@KINDS
def test_statistics_for_a_loss_of_ones_own(kind):
    agent, batch = build(kind), padded_batch(kind)
    states = agent.encode(batch)[:, :-1]
    mask = batch.transition_mask
    dist = agent.actor(states)
    entropy = agent._policy_stats(mask, dist)
    assert entropy.keys() <= {"Policy Entropy"}
    if kind == "discrete":
        torch.testing.assert_close(entropy["Policy Entropy"], dist.entropy()[mask.squeeze(-1)].mean())
        of_all = agent._policy_stats(mask, agent.actor(agent.encode(batch)))  # with the row of the last observation
        torch.testing.assert_close(of_all, entropy)
    wide = mask[:, :, None].expand(-1, -1, G, -1)
    weights = torch.arange(B).float()[:, None, None, None].expand(B, L, G, 1)
    for given in (mask, wide):
        of_filter = agent._filter_stats(given, torch.full((B, L, G, 1), -2.0), weights)
        assert float(of_filter["Filter Weight"]) == pytest.approx((4 * 1 + 1 * 2) / 11)
        assert float(of_filter["Pct. of Actions Approved by Filter"]) == pytest.approx(100 * 5 / 11)
        assert float(of_filter["Log-Probability of Actions"]) == pytest.approx(-2.0)
    assert len(agent._popart_stats()) == 2 * G
    td = agent._td_stats(mask, torch.ones(B, L, C, G, 1), target=torch.full((B, L, 1, G, 1), 3.0))
    assert {k: float(v) for k, v in td.items()} == pytest.approx(
        {"TD Statistic 1 (mean)": 1.0, "TD Statistic 1 (std)": 0.0, "target (mean)": 3.0, "target (std)": 0.0}
    )
    assert not any(v.requires_grad for v in {**entropy, **of_filter, **td, **agent._popart_stats()}.values())


class Masks(Agent):
    def edit_actor_mask(self, batch, actor_loss, pad_mask):
        assert (actor_loss.shape, pad_mask.dtype) == ((B, L, G, 1), torch.bool)
        assert pad_mask.shape == actor_loss.shape
        return pad_mask & (batch.rews > 0)[:, :, None].expand_as(pad_mask)

    def edit_critic_mask(self, batch, critic_loss, pad_mask):
        if critic_loss is None:
            return pad_mask
        assert critic_loss.shape == pad_mask.shape == (B, L, C, G, 1)
        return torch.zeros_like(pad_mask)


def test_masks_of_agents_as_methods_and_on_an_instance():
    batch, plain, masked = padded_batch(), build().eval(), build(agent_type=Masks).eval()
    torch.manual_seed(3)
    losses = plain.losses(batch)
    torch.manual_seed(3)
    masked(batch, log_step=False)
    counted = losses.actor_loss[(batch.transition_mask & (batch.rews > 0)).squeeze(-1)]
    torch.testing.assert_close(masked.update_info["Actor Loss"], counted.mean())
    assert masked.update_info["Critic Loss"] == 0
    plain.edit_actor_mask = lambda batch, actor_loss, pad_mask: torch.zeros_like(pad_mask)
    plain(batch, log_step=False)
    assert plain.update_info["Actor Loss"] == 0
    assert plain.update_info["Critic Loss"] > 0
    # numbers are weights
    plain.edit_actor_mask = lambda batch, actor_loss, pad_mask: pad_mask * 0.5
    torch.manual_seed(3)
    plain(batch, log_step=False)
    mean = losses.actor_loss[batch.transition_mask.squeeze(-1)].mean()
    torch.testing.assert_close(plain.update_info["Actor Loss"], mean)


def test_masks_of_the_experiment_come_after_those_of_the_agent(tmp_path):
    seen = []

    class FirstStep(Agent):
        def edit_critic_mask(self, batch, critic_loss, pad_mask):
            return pad_mask & (torch.arange(pad_mask.shape[1]) == 0)[None, :, None, None, None]

    class Watch(amago.Experiment):
        def edit_critic_mask(self, batch, critic_loss, pad_mask):
            seen.append(pad_mask)
            return torch.zeros_like(pad_mask)

    e = tiny.learned(tmp_path, experiment_type=Watch, agent_type=FirstStep)
    assert seen
    assert not seen[0][:, 1:].any()
    assert tiny.rows(e.run_dir, "train")[-1]["values"]["Critic Loss"] == 0.0
    e.close()


class Stateful:
    """A filter that the training step talks to."""

    def __init__(self):
        self.mask = None

    def set_mask(self, mask):
        self.mask = mask

    def __call__(self, adv):
        self.shape = adv.shape
        return (adv > 0).float() * self.mask


@pytest.mark.parametrize(("agent_type", "rows"), [(Agent, L), (MultiTaskAgent, L + 1)])
def test_filters_may_be_objects_and_see_these_shapes(agent_type, rows):
    agent, batch = build(agent_type=agent_type, fbc_filter_func=Stateful(), online_coeff=0.0, offline_coeff=1.0), padded_batch()
    agent.fbc_filter_func.set_mask(torch.zeros(B, rows, 1, 1))
    agent(batch, log_step=True)
    assert agent.fbc_filter_func.shape == (B, rows, G, 1)
    assert agent.update_info["Actor Loss"] == 0


def test_gradient_norms():
    agent = build()
    agent(padded_batch(), log_step=False).backward()
    norms = agent.get_grad_norms()
    assert set(norms) == {f"{part} Grad Norm" for part in ("Actor", "Critic", "TrajEncoder", "TstepEncoder")}
    assert all(float(x) > 0 for x in norms.values())


def test_values_by_name():
    for agent_type in (Agent, MultiTaskAgent):
        values = build(agent_type=agent_type).get_values(padded_batch())
        for name in ("q_sa", "v_s", "advantage", "filter_weights", "q_sa_std", "v_s_std"):
            assert values[name].shape == (B, L, G, 1)
        assert values["state_mask"].equal(padded_batch().mask[:, 1:])
        assert values.q is values["q_sa"]


# ---- targets -------------------------------------------------------------------------------------------------------------


def test_an_agent_is_copied_after_a_loss():
    agent, batch = build(), padded_batch()
    agent(batch, log_step=True).backward()
    twin = copy.deepcopy(agent)
    assert twin.update_info.keys() == agent.update_info.keys()
    assert tiny.differing(dict(agent.state_dict()), dict(twin.state_dict())) == []
    twin(batch, log_step=False).backward()
    assert twin.actor.base.out_layer.bias.grad is not agent.actor.base.out_layer.bias.grad


def test_copies_of_networks():
    agent = build()
    with torch.no_grad():
        for p in [*agent.actor.parameters(), *agent.critics.parameters()]:
            p.add_(1.0)
    agent.soft_sync_targets()
    moved = next(agent.actor.parameters()) - next(agent.target_actor.parameters())
    torch.testing.assert_close(moved, torch.full_like(moved, 1.0 - 0.003), rtol=1e-3, atol=1e-3)
    agent._ema_copy(agent.target_actor, agent.actor, tau=0.5)
    halved = next(agent.actor.parameters()) - next(agent.target_actor.parameters())
    torch.testing.assert_close(halved, 0.5 * moved)
    agent.hard_sync_targets()
    assert next(agent.actor.parameters()).equal(next(agent.target_actor.parameters()))
    other = copy.deepcopy(agent.critics)
    nn.init.zeros_(next(other.parameters()))
    agent._full_copy(agent.target_critics, other)
    assert not next(agent.target_critics.parameters()).any()


def test_maximized_critics_are_the_critics_without_a_gradient_to_them():
    agent, state = build("continuous"), torch.randn(2, 5, 16)
    action = torch.rand(1, 2, 5, G, 2).requires_grad_()
    q = agent.maximized_critics(state, action)
    torch.testing.assert_close(q, agent.critics(state, action))
    q.sum().backward()
    assert action.grad.any()
    assert all(p.grad is None for p in agent.critics.parameters())
    with torch.no_grad():
        for p in agent.critics.parameters():
            p.mul_(2.0)
    torch.testing.assert_close(agent.maximized_critics(state, action), agent.critics(state, action))
    copied = copy.deepcopy(agent)
    nn.init.zeros_(copied.critics.net.output_layer.weight)
    nn.init.zeros_(copied.critics.net.output_layer.bias)
    assert not copied.maximized_critics(state, action).any()
    assert agent.maximized_critics(state, action).any()


def test_targets_of_a_subclass_with_real_copies():
    class RealCopies(Agent):
        def init_actor_critic(self):
            super().init_actor_critic()
            self.maximized_critics = copy.deepcopy(self.critics)

    agent = build(agent_type=RealCopies)
    nn.init.zeros_(agent.critics.net.output_layer.weight)
    agent.soft_sync_targets()
    assert not agent.maximized_critics.net.output_layer.weight.any()
    assert agent(padded_batch()).isfinite()


# ---- acting --------------------------------------------------------------------------------------------------------------


@BOTH
@KINDS
def test_actions_with_a_dimension_of_timesteps(agent_type, kind):
    agent, batch = build(kind, agent_type=agent_type).eval(), padded_batch(kind)
    memory = theirs = None
    for t in range(3):
        obs, rl2s, times = (
            {k: v[:, t : t + 1] for k, v in batch.obs.items()},
            batch.rl2s[:, t : t + 1],
            batch.time_idxs[:, t : t + 1],
        )
        if t == 0:
            memory, theirs = (agent.init_hidden_state(B, "cpu") for _ in range(2))
        actions, theirs = agent.get_actions(obs=obs, rl2s=rl2s, time_idxs=times, hidden_state=theirs, sample=False)
        flat, memory = agent.get_actions({k: v[:, 0] for k, v in obs.items()}, rl2s[:, 0], times[:, 0], memory, sample=False)
        assert actions.shape == (B, 1, 1 if kind == "discrete" else WIDTHS[kind])
        assert actions.dtype == (torch.float32 if kind == "continuous" else torch.uint8)
        torch.testing.assert_close(actions[:, 0].to(flat.dtype), flat)
    with pytest.raises(ValueError, match=r"takes one timestep, rl2s \(N, 1 \+ A\) or \(N, 1, 1 \+ A\), got \(3, 2,"):
        agent.get_actions(batch.obs, batch.rl2s[:, :2], batch.time_idxs, None)


def test_greedy_actions_are_the_likeliest_of_the_last_discount():
    agent, batch = build().eval(), padded_batch()
    obs, rl2s, times = {k: v[:, :1] for k, v in batch.obs.items()}, batch.rl2s[:, :1], batch.time_idxs[:, :1]
    state, _ = agent.get_state_embedding(obs, rl2s, times)
    assert state.shape == (B, 1, 16)
    probs = agent.actor(state).probs
    assert probs.shape == (B, 1, G, 3)
    actions, _ = agent.get_actions(obs, rl2s, times, sample=False)
    assert actions[:, 0, 0].tolist() == probs[:, 0, -1].argmax(-1).tolist()


def test_attributes_of_a_policys_output_may_be_set_from_outside():
    from amago.nets.policy_dists import Discrete

    @gin.configurable(module="tests.compat")
    class Tempered(Discrete):
        temperature = 1.0

        def forward(self, vec, log_dict=None):
            return super().forward(vec / self.temperature, log_dict=log_dict)

    config.bind({"Actor.discrete_dist_type": Tempered})
    agent, batch = build().eval(), padded_batch()
    with torch.no_grad():
        agent.actor.base.out_layer.bias.mul_(100.0)
    step = {k: v[:, :1] for k, v in batch.obs.items()}, batch.rl2s[:, :1], batch.time_idxs[:, :1]
    greedy, _ = agent.get_actions(*step, sample=False)
    agent.actor.policy_dist.temperature = torch.full((B, 1, 1, 1), 1e-4)
    for _ in range(5):
        drawn, _ = agent.get_actions(*step, sample=True)
        assert drawn.equal(greedy)
    assert agent.actor.policy_dist(torch.randn(B, 1, G, 3)).probs.shape == (B, 1, G, 3)


def test_states_of_whole_sequences_and_memory():
    for traj in (GRUTrajEncoder, TformerTrajEncoder):
        agent, batch = build(traj=traj).eval(), padded_batch()
        whole, hidden = agent.get_state_embedding(batch.obs, batch.rl2s, batch.time_idxs)
        assert whole.shape == (B, L + 1, 16)
        hidden = agent.init_hidden_state(B, "cpu")
        for t in range(2):
            step = {k: v[:, t : t + 1] for k, v in batch.obs.items()}, batch.rl2s[:, t : t + 1], batch.time_idxs[:, t : t + 1]
            with torch.no_grad():
                one, hidden = agent.get_state_embedding(*step, hidden_state=hidden)
            torch.testing.assert_close(one[:, 0], whole[:, t], rtol=1e-4, atol=1e-4)
        agent.reset_hidden_state(hidden, np.array([True, False, False]))


# ---- weights -------------------------------------------------------------------------------------------------------------


class Told(Agent):
    told = None

    def on_checkpoint_loaded(self, is_resume=False):
        super().on_checkpoint_loaded(is_resume=is_resume)
        self.told = is_resume


def test_an_agent_is_told_of_loaded_weights(tmp_path):
    e = tiny.learned(tmp_path, agent_type=Told, ckpt_interval=1)
    assert e.policy.told is None
    e.load_checkpoint(0, resume_training_state=False)
    assert e.policy.told is False
    e.load_checkpoint(0)
    assert e.policy.told is True
    e.close()


@BOTH
def test_key_sets_agree_and_load_strictly(agent_type):
    agent = build(agent_type=agent_type)
    keys = set(agent.state_dict())
    copies = {k.replace("maximized_critics.", "critics.", 1) for k in keys if k.startswith("maximized_critics.")}
    assert copies == {k for k in keys if k.startswith("critics.")}
    theirs = {k: v.clone() + 0.5 for k, v in agent.state_dict().items()}
    other = build(agent_type=agent_type)
    assert set(theirs) == set(other.state_dict())
    other.load_state_dict(theirs, strict=True)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, theirs[name], msg=name)
    # those of earlier versions, without copies
    other.load_state_dict(
        {k: v for k, v in agent.state_dict().items() if k in keys - set(map("maximized_".__add__, copies))}, strict=True
    )
    with pytest.raises(RuntimeError, match="unexpected_part"):
        other.load_state_dict(theirs | {"unexpected_part.weight": torch.zeros(1)}, strict=True)


def test_files_of_ours_load_strictly_there(tmp_path):
    e = tiny.learned(tmp_path, ckpt_interval=1)
    for file in (e.run_dir / "ckpts" / "policy_weights").glob("*.pt"):
        stored = torch.load(file, map_location="cpu", weights_only=True)
        assert stored.keys() == e.policy.state_dict().keys()
        for name in [k for k in stored if k.startswith("maximized_critics.")]:
            own = stored[name.removeprefix("maximized_")]
            assert stored[name].equal(own)
            assert stored[name].data_ptr() == own.data_ptr()  # stored once
        e.policy.load_state_dict(stored, strict=True)
    e.close()


def test_a_base_agent_of_ones_own(tmp_path):
    class Cloning(BaseAgent):
        def init_actor_critic(self):
            self.actor = nn.Linear(self.state_dim, self.action_dim)

        @property
        def trainable_params(self):
            return itertools.chain(super().trainable_params, self.actor.parameters())

        def forward(self, batch, log_step):
            logits = self.actor(self.encode(batch)[:, :-1])
            loss = -(logits.log_softmax(-1) * batch.actions).sum(-1, keepdim=True)[batch.transition_mask].mean()
            self.update_info = {"Actor Loss": loss.item(), "Critic Loss": 0.0}
            return loss

        def act(self, state, obs, sample, gamma_idx=None):
            return self.actor(state).argmax(-1, keepdim=True)

    e = tiny.learned(tmp_path, agent_type=Cloning)
    values = tiny.rows(e.run_dir, "train")[-1]["values"]
    assert values["Loss"] == pytest.approx(values["Actor Loss"])
    e.close()
