"""Agents as modules: losses, options and their refusals, actions, probabilities, losses that are not finite."""

import itertools
import math

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from messages import naming

from amago import config
from amago.agent import Agent, MultiTaskAgent, exp_filter, leaky_relu_filter
from amago.agent.base import action_vectors
from amago.agent.methods import log_prob_of
from amago.loading import Batch
from amago.nets.actor_critic import NCritics, NCriticsTwoHot
from amago.nets.policy_dists import GMM, Beta, TanhGaussian, distribution_of
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.spaces import action_spec, rl2_space

SPACES = {
    "discrete": gym.spaces.Discrete(4),
    "continuous": gym.spaces.Box(-1, 1, (3,)),
    "multibinary": gym.spaces.MultiBinary(5),
}
OBS = gym.spaces.Dict({"mask": gym.spaces.Box(0, 1, (4,)), "observation": gym.spaces.Box(-np.inf, np.inf, (6,))})
AGENTS = {"agent": Agent, "multitask": MultiTaskAgent}


def build(kind, traj=FFTrajEncoder, agent_type=Agent, **options):
    """An agent for a kind of `SPACES`, or for a space."""
    config.bind(tiny.NETWORKS | tiny.TWO_HOT)
    space = SPACES[kind] if isinstance(kind, str) else kind
    return agent_type(OBS, rl2_space(action_spec(space)), space, 8, FFTstepEncoder, traj, **options)


def make_batch(kind, b=3, length=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    spec = action_spec(SPACES[kind] if isinstance(kind, str) else kind)
    if not isinstance(kind, str):
        actions = torch.zeros(b, length, spec.dim)
        actions[..., [part.vector.start for part in spec.parts]] = 1.0
    elif kind == "discrete":
        actions = torch.nn.functional.one_hot(torch.randint(4, (b, length), generator=g), 4).float()
    elif kind == "continuous":
        actions = torch.rand(b, length, 3, generator=g) * 2 - 1
    else:
        actions = torch.randint(2, (b, length, 5), generator=g).float()
    lengths = torch.tensor([length, length - 2, 1])[:b]
    return Batch(
        obs={"mask": torch.ones(b, length + 1, 4), "observation": torch.randn(b, length + 1, 6, generator=g)},
        rl2s=torch.randn(b, length + 1, 1 + spec.dim, generator=g), rews=torch.randn(b, length, 1, generator=g),
        dones=torch.rand(b, length, 1, generator=g) < 0.2, actions=actions,
        time_idxs=torch.arange(length + 1)[None, :, None].expand(b, -1, -1),
        mask=torch.arange(length + 1)[None, :, None] <= lengths[:, None, None],
    )  # fmt: skip


OPTIONS = [
    {"use_multigamma": False}, {"n_step": 3}, {"popart": False}, {"use_target_actor": False},
    {"online_coeff": 0.0, "offline_coeff": 1.0}, {"online_coeff": 1.0, "offline_coeff": 0.0}, {"online_coeff": 0.5, "offline_coeff": 0.5},
    {"fbc_filter_func": exp_filter}, {"fbc_filter_func": leaky_relu_filter}, {"fbc_filter_func": lambda adv: adv.sigmoid()},
    {"fake_filter": True, "online_coeff": 1.0},
    {"num_critics": 3, "num_critics_td": 3, "num_actions_for_value_in_critic_loss": 2, "num_actions_for_value_in_actor_loss": 3},
]  # fmt: skip


@pytest.mark.parametrize("agent_type", AGENTS.values(), ids=AGENTS)
@pytest.mark.parametrize(("kind", "options"), [*((kind, {}) for kind in SPACES), *zip(itertools.cycle(SPACES), OPTIONS)])
def test_every_option_gives_finite_losses_of_the_documented_shapes(kind, options, agent_type):
    agent, batch = build(kind, agent_type=agent_type, **options), make_batch(kind)
    loss = agent.losses(batch, log_step=True)
    groups = 1 if options.get("use_multigamma") is False else 7
    critics = options.get("num_critics", 4)
    assert loss["actor"].shape == (3, 6, groups, 1)
    assert loss["critic"].shape == (3, 6, critics, groups, 1)
    assert torch.isfinite(loss["actor"]).all()
    assert torch.isfinite(loss["critic"]).all()
    (loss["actor"].mean() + loss["critic"].mean()).backward()
    for name, p in agent.named_parameters():
        trained = not name.startswith("target_")
        assert (p.grad is not None) == trained, name
    assert all(np.isfinite(float(v)) for v in agent.update_info.values())


@pytest.mark.parametrize("agent_type", AGENTS.values(), ids=AGENTS)
def test_plain_cloning_needs_no_critic(agent_type):
    loss = build("discrete", agent_type=agent_type, fake_filter=True, online_coeff=0.0).losses(make_batch("discrete"))
    assert loss.keys() == {"actor"}
    loss["actor"].mean().backward()


def test_targets_follow_slowly_and_are_not_trained():
    agent = build("continuous", tau=0.1)
    assert not {id(p) for p in agent.trainable_params} & {id(p) for p in agent.target_critics.parameters()}
    before = [p.clone() for p in agent.target_actor.parameters()]
    with torch.no_grad():
        for p in agent.actor.parameters():
            p.add_(1.0)
    agent.soft_sync_targets()
    for old, new in zip(before, agent.target_actor.parameters(), strict=True):
        torch.testing.assert_close(new, old + 0.1)


@pytest.mark.parametrize("agent_type", AGENTS.values(), ids=AGENTS)
@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("traj", [FFTrajEncoder, GRUTrajEncoder, TformerTrajEncoder])
def test_actions_are_in_stored_form_and_follow_the_sequence(kind, traj, agent_type):
    torch.manual_seed(0)
    agent, batch = build(kind, traj, agent_type).eval(), make_batch(kind)
    spec, memory = agent.action_spec, agent.init_hidden_state(3, "cpu")
    with torch.no_grad():
        states = agent.encode(batch)
    for t in range(6):
        obs = {k: v[:, t] for k, v in batch.obs.items()}
        actions, memory = agent.get_actions(obs, batch.rl2s[:, t], batch.time_idxs[:, t], memory, sample=False)
        assert (actions.shape, actions.numpy().dtype) == ((3, spec.stored_dim), spec.stored_dtype)
        torch.testing.assert_close(actions, agent.act(states[:, t], obs, sample=False), atol=1e-4, rtol=1e-4)
        for row in actions.numpy():
            assert SPACES[kind].contains(spec.to_env(row))


@pytest.mark.parametrize("agent_type", [Agent, MultiTaskAgent])
def test_a_discount_of_one_learns_where_rollouts_terminate(tmp_path, agent_type):
    config.bind(tiny.TWO_HOT | {f"{agent_type.__name__}.gamma": 1.0})
    e = tiny.learned(tmp_path, agent_type=agent_type, train_batches_per_epoch=3)
    assert e.policy.gammas.max() == 1.0
    (row,) = tiny.rows(e.run_dir, "train")
    assert all(value is not None for value in row["values"].values())


class Predicts(Agent):
    """Adds a loss of its own, weighted by name."""

    loss_weights = {"aux": 0.5}

    def init_extra_networks(self):
        self.predict = torch.nn.Linear(self.state_dim, 1)

    @property
    def trainable_params(self):
        return [*super().trainable_params, *self.predict.parameters()]

    def losses(self, batch, log_step=False):
        losses = super().losses(batch, log_step)
        self.error = (self.predict(self.encode(batch)[:, 1:]) - batch.rews) ** 2  # (B, L, 1)
        return losses | {"aux": self.error}


def test_a_subclass_adds_a_loss_by_name():
    agent, batch = build("discrete", agent_type=Predicts), make_batch("discrete")
    total = agent(batch, log_step=True)
    info, aux = agent.update_info, agent.error[batch.transition_mask].mean()
    torch.testing.assert_close(info["Aux Loss"], aux)
    torch.testing.assert_close(total, info["Actor Loss"] + 10.0 * info["Critic Loss"] + 0.5 * aux)
    total.backward()
    assert agent.predict.weight.grad.any()


SEVERAL = gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.MultiBinary(2), gym.spaces.Box(-1, 1, (2,))))
OFFLINE = {"online_coeff": 0.0, "offline_coeff": 1.0}
MULTI = {"agent_type": MultiTaskAgent}
REFUSED = [
    ({"tau": 0.0}, ("tau=0.0", "(0, 1]")),
    ({"num_critics": 0}, ("num_critics=0",)),
    ({"n_step": 1.5}, ("n_step=1.5",)),
    ({"offline_coeff": -1.0}, ("offline_coeff=-1.0",)),
    ({"online_coeff": 0.0, "offline_coeff": 0.0}, ("online_coeff", "offline_coeff", "both 0")),
    ({"reward_multiplier": 0.0}, ("reward_multiplier=0.0",)),
    ({"rollout_gamma_idx": 7}, ("rollout_gamma_idx=7", "0.1", "0.999")),
    ({"gamma": 1.1}, ("gamma=1.1",)),
    ({"pass_obs_keys_to_actor": ["legal"]}, (["legal"], ["mask", "observation"])),
    ({"targets": "q_lambda"}, ("targets='q_lambda'", "'tree_backup'")),
    ({"targets": "tree_backup", "n_step": 3}, ("n_step=3", "targets='tree_backup'")),
    ({"targets": "tree_backup", "kind": "continuous"}, ("targets='tree_backup'", "Box", "'n_step'")),
    ({"trace_lambda": 1.5}, ("trace_lambda=1.5",)),
    ({"burn_in": -1}, ("burn_in=-1",)),
    ({"burn_in": 8}, ("burn_in=8", "max_seq_len=8")),
    ({"bootstrap_context": 0}, ("bootstrap_context=0",)),
    ({"bootstrap_context": 9}, ("bootstrap_context=9", "max_seq_len=8")),
    ({"rescale_critics": True, "popart": False}, ("rescale_critics=True", "popart=False")),
    ({"rescale_critics": True} | MULTI, ("rescale_critics=True", "critic_type", "NCriticsTwoHot")),
    ({"critic_type": NCriticsTwoHot}, ("critic_type=NCriticsTwoHot", "MultiTaskAgent")),
    ({"critic_type": NCritics} | MULTI, ("critic_type=NCritics", "NCriticsTwoHot")),
    ({"entropy_target": 0.5} | OFFLINE, ("entropy_target=0.5", "online_coeff=0")),
    ({"entropy_target": 1.0}, ("entropy_target=1.0", "share")),
    ({"entropy_target": 1.5, "kind": "multibinary"}, ("entropy_target=1.5", "share")),
    ({"entropy_target": 0.7, "kind": "continuous"}, ("entropy_target=0.7", "0.693")),
    ({"entropy_target": math.nan, "kind": "continuous"}, ("entropy_target=nan",)),
    ({"entropy_target": 0.5, "kind": SEVERAL}, ("entropy_target=0.5", "Tuple", "entropy_coeff")),
    ({"targets": "tree_backup", "kind": SEVERAL}, ("targets='tree_backup'", "Tuple")),
    ({"entropy_coeff": 0.0}, ("entropy_coeff=0.0",)),
    ({"entropy_lr": 0.0}, ("entropy_lr=0.0",)),
    ({"entropy_coeff": 0.5} | MULTI, ("entropy_coeff=0.5", "online_coeff=0")),
]


def test_wrong_options_are_refused_by_name():
    for options, words in REFUSED:
        with pytest.raises(ValueError, match=naming(*words)):
            build(options.get("kind", "discrete"), **{k: v for k, v in options.items() if k != "kind"})
    assert build(SEVERAL, entropy_coeff=0.5).temperature is not None
    with pytest.raises(TypeError, match="gama"):
        build("discrete", gama=0.9)
    with pytest.raises(ValueError, match=naming("Agent", "gama", "gamma")):
        config.bind({"Agent.gama": 0.9})


@pytest.mark.parametrize("agent_type", AGENTS.values(), ids=AGENTS)
def test_a_policy_gradient_without_reparametrised_samples_is_refused_at_the_start(agent_type):
    config.bind({"Actor.continuous_dist_type": GMM})
    with pytest.raises(ValueError, match=naming("online_coeff=0.5", "GMM", f"{agent_type.__name__}.online_coeff = 0")):
        build("continuous", agent_type=agent_type, online_coeff=0.5)
    build("discrete", agent_type=agent_type, online_coeff=0.5)  # has no continuous distribution


EVERY = {
    "discrete": (gym.spaces.Discrete(4), [range(4)]),
    "bits": (gym.spaces.MultiBinary(3), [range(2)] * 3),
    "multidiscrete": (gym.spaces.MultiDiscrete([2, 3]), [range(2), range(3)]),
    "tuple": (gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.MultiBinary(2))), [range(3), range(2), range(2)]),
}


@pytest.mark.parametrize("kind", EVERY)
def test_probabilities_sum_to_one(kind):
    space, choices = EVERY[kind]
    spec = action_spec(space)
    head = distribution_of(spec.kind, spec.dim, TanhGaussian)
    dist = head.make(torch.randn(1, head.input_dimension, generator=torch.Generator().manual_seed(0)))
    logs = [log_prob_of(dist, action_vectors(spec, torch.tensor([action]))) for action in itertools.product(*choices)]
    assert torch.cat(logs).exp().sum().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("kind", SPACES)
def test_an_agent_chooses_the_same_with_and_without_extras(kind):
    agent = build(kind).eval()
    state, obs, random = torch.randn(3, agent.traj_encoder.emb_dim), {}, torch.get_rng_state()
    plain = agent.act(state, obs, True)
    torch.set_rng_state(random)
    actions, extras = agent.act_with_extras(state, obs, True, ["log_prob"])
    assert torch.equal(plain, actions)
    assert extras["log_prob"].shape == (3,)
    assert torch.isfinite(extras["log_prob"]).all()


ACTIONS = SPACES | {
    "multidiscrete": gym.spaces.MultiDiscrete([3, 2]),
    "tuple": gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.MultiBinary(2))),
    "dict": gym.spaces.Dict({"pick": gym.spaces.Discrete(3), "force": gym.spaces.Box(-1, 1, (2,))}),
}


POLICIES = [*((a, TanhGaussian) for a in ACTIONS), ("continuous", Beta), ("dict", Beta), ("continuous", GMM), ("dict", GMM)]
BROKEN = zip(POLICIES, itertools.cycle(AGENTS.values()), itertools.cycle(["rews", "rl2s", "observation"]))


@pytest.mark.parametrize(("actions", "dist", "agent_type", "where"), [(*policy, *more) for policy, *more in BROKEN])
def test_nan_makes_a_loss_that_is_skipped_and_reaches_no_statistics(actions, dist, agent_type, where):
    """The learner skips a loss that is not finite; `test_nonfinite` has whole updates."""
    config.bind({"Actor.continuous_dist_type": dist})
    torch.manual_seed(0)
    online_coeff = 0.0 if dist is GMM else 1.0  # it has no policy gradient
    agent = build(ACTIONS[actions], agent_type=agent_type, online_coeff=online_coeff, offline_coeff=1.0)
    batch = make_batch(ACTIONS[actions])
    broken = batch.obs["observation"] if where == "observation" else getattr(batch, where)
    broken[0, 1, 0] = torch.nan
    assert not agent(batch, log_step=True).isfinite()
    assert all(b.isfinite().all() for b in agent.buffers())
    assert agent(make_batch(ACTIONS[actions]), log_step=True).isfinite()
