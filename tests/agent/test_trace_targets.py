"""Targets over whole sequences, and burn-in, as a user of the agents meets them; `test_oracles` has their numbers."""

import gymnasium as gym
import pytest
import tiny
import torch
from messages import naming
from test_agent import AGENTS, SMALL, SPACES, build, make_batch

import amago
from amago import config
from amago.agent.log_prob import behaviour_of, log_prob_of_action, log_prob_of_stored
from amago.agent.traces import Taken, trace_coefficients
from amago.nets.actor_critic import NCritics
from amago.nets.product import distribution_of
from amago.nets.traj_encoders import GRUTrajEncoder, TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.spaces import action_spec, rl2_space

METHODS = ("retrace", "tree_backup", "peng")
EVERY = {
    **SPACES,
    "several": gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.MultiBinary(2), gym.spaces.Box(-1, 1, (2,)))),
}


def batch_of(kind, seed=0, behaviour=-1.0):
    batch = make_batch(kind, seed=seed)
    batch.extras["behaviour_log_prob"] = torch.full(batch.rews.shape[:2], behaviour)
    return batch


def targets_of(agent, batch, seed=0):
    """The targets (B, L, G) of a batch, as its critics' loss sees them."""
    seen = []
    observe, agent.values.observe = agent.values.observe, lambda target, mask: seen.append(target[:, :, 0, :, 0].clone())
    torch.manual_seed(seed)
    agent.train()(batch)
    agent.values.observe = observe
    return seen[0]


@pytest.mark.parametrize("kind", list(SPACES))
@pytest.mark.parametrize("name", list(AGENTS))
def test_lambda_zero_is_the_target_with_one_reward(name, kind):
    batch, found = batch_of(kind), []
    for targets in ("n_step", *METHODS):
        if (targets, kind) != ("tree_backup", "continuous"):
            torch.manual_seed(0)
            agent = build(kind, agent_type=AGENTS[name], targets=targets, trace_lambda=0.0)
            found.append(targets_of(agent, batch)[batch.transition_mask[..., 0]])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.mark.parametrize("targets", METHODS)
def test_targets_do_not_depend_on_padding_nor_on_what_follows_the_end(targets):
    torch.manual_seed(0)
    agent = build("discrete", targets=targets)
    batch = batch_of("discrete")
    batch.dones[:] = False
    batch.dones[0, 2] = True
    first = targets_of(agent, batch)
    other = batch_of("discrete", seed=1)
    for mine, its in ((batch.rews, other.rews), (batch.actions, other.actions)):
        mine[0, 3:] = its[0, 3:]  # after termination
        mine[~batch.transition_mask[..., 0]] = its[~batch.transition_mask[..., 0]]
    batch.extras["behaviour_log_prob"][~batch.transition_mask[..., 0]] = 7.0
    second = targets_of(agent, batch)
    torch.testing.assert_close(second[0, :3], first[0, :3])
    torch.testing.assert_close(second[1:][batch.transition_mask[1:, :, 0]], first[1:][batch.transition_mask[1:, :, 0]])
    assert not torch.allclose(second[0, 3], first[0, 3])


@pytest.mark.parametrize("targets", METHODS)
def test_a_late_reward_reaches_the_first_step(targets):
    torch.manual_seed(0)
    agent = build("discrete", targets=targets, trace_lambda=1.0, popart=False)
    batch = batch_of("discrete")
    batch.dones[:] = False
    before = targets_of(agent, batch)
    batch.rews[0, -1] += 1.0
    after = targets_of(agent, batch)
    gain = (after - before)[0]
    assert (gain[:, 1:] > 0).all()  # the first discount is 0.1
    assert gain[-1, -1] == pytest.approx(10.0)  # times reward_multiplier
    if targets == "peng":
        torch.testing.assert_close(gain[0], 10.0 * agent.gammas**5, rtol=1e-3, atol=1e-3)
    else:
        assert gain[0, -1] < 5.0, "no further than the policy agrees with the data"
    n_step = build("discrete", popart=False)
    batch.rews[0, -1] -= 1.0
    before = targets_of(n_step, batch)
    batch.rews[0, -1] += 1.0
    assert ((targets_of(n_step, batch) - before)[0, :-1] == 0).all()


@pytest.mark.parametrize("kind", list(EVERY))
def test_coefficients_follow_the_ratio_and_never_exceed_lambda(kind):
    torch.manual_seed(0)
    spec = action_spec(EVERY[kind])
    head = distribution_of(spec.kind, spec.dim, amago.nets.policy_dists.TanhGaussian)
    policy = head(torch.randn(2, 3, 2, head.input_dimension))  # (B, L, G)
    stored = policy.sample_action(True)[:, :, 0]
    vector = torch.as_tensor(spec.to_vector(stored.numpy())).float()
    own = log_prob_of_action(policy, vector[:, :, None])
    same = torch.stack([log_prob_of_stored(policy, stored[:, :, None].expand(-1, -1, 2, -1))]).squeeze(0)
    torch.testing.assert_close(own[..., 0], same, msg="vectors and stored actions are as likely")
    for shift, want in ((0.0, 0.8), (1.0, 0.8), (-1.0, 0.8 * torch.tensor(-1.0).exp().item())):
        taken = Taken(vector, own[:, :, 0] - shift)
        c = trace_coefficients(policy, taken, 0.8)
        assert c.shape == (2, 3, 2, 1)
        torch.testing.assert_close(c[:, :, 0], torch.full((2, 3, 1), want))
        assert (c <= 0.8).all()


def test_data_of_unknown_behaviour_is_treated_as_by_tree_backup():
    torch.manual_seed(0)
    retrace = build("discrete", targets="retrace")
    torch.manual_seed(0)
    tree = build("discrete", targets="tree_backup")
    batch = batch_of("discrete", behaviour=0.0)
    torch.testing.assert_close(targets_of(retrace, batch), targets_of(tree, batch))


def test_the_behaviour_of_every_kind_of_policy_has_the_layout_of_its_vector():
    spec = action_spec(EVERY["several"])
    head = distribution_of(spec.kind, spec.dim, amago.nets.policy_dists.TanhGaussian)
    policy = head(torch.randn(4, head.input_dimension))
    stored = policy.sample_action(True)
    found = behaviour_of(policy, stored, True)
    assert found.shape == (4, 1 + spec.dim)
    torch.testing.assert_close(found[:, 0], log_prob_of_stored(policy, stored))
    torch.testing.assert_close(found[:, 1:4], policy.factors[0].probs)
    torch.testing.assert_close(found[:, 4:6], policy.factors[1].probs)
    assert (found[:, 6:] == 0).all()
    greedy = behaviour_of(policy, policy.sample_action(False), False)
    assert (greedy[:, 1:6].sum(dim=1) >= 1).all()
    assert set(greedy[:, 1:6].unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("traj", [GRUTrajEncoder, TformerTrajEncoder])
@pytest.mark.parametrize("targets", METHODS)
def test_no_gradient_passes_through_targets(targets, traj):
    """With the main discount alone and a critic's loss alone, the last real state has no part but as a target."""
    torch.manual_seed(0)
    agent = build("discrete", traj, targets=targets, online_coeff=0.0, offline_coeff=1.0)
    batch = batch_of("discrete")
    batch.obs["observation"].requires_grad_()
    agent(batch).backward()
    grad = batch.obs["observation"].grad
    assert (grad[0, -1] == 0).all()
    assert (grad[0, :-1] != 0).any(dim=-1).all()
    assert all(p.grad is None for p in agent.target_critics.parameters())


def test_masked_actions_and_critics_of_ones_own():
    class Own(NCritics):
        def critic_network_forward(self, state, action, log_dict=None):
            return super().critic_network_forward(state, action, log_dict)

    config.bind({"ActionMask.key": "mask"})
    torch.manual_seed(0)
    agent = build("discrete", targets="retrace", critic_type=Own)
    batch = batch_of("discrete")
    legal = torch.rand(batch.obs["mask"].shape) < 0.6
    legal[:, :-1] |= batch.actions.bool()
    legal[..., 0] |= ~legal.any(dim=-1)
    batch.obs["mask"] = legal.float()
    agent(batch).backward()
    assert torch.isfinite(agent.update_info["Critic Loss"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"targets": "q_lambda"}, ("targets", "'q_lambda'", "'peng'")),
        ({"targets": "peng", "n_step": 3}, ("n_step=3", "targets='peng'")),
        ({"trace_lambda": 1.5}, ("trace_lambda=1.5",)),
        ({"burn_in": -1}, ("burn_in=-1",)),
        ({"burn_in": 1.5}, ("burn_in=1.5",)),
        ({"burn_in": 8}, ("burn_in=8", "max_seq_len=8")),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ValueError, match=naming(*words)):
        build("discrete", **options)


def test_tree_backup_needs_probabilities():
    with pytest.raises(ValueError, match=naming("targets='tree_backup'", "Box", "'retrace'")):
        build("continuous", targets="tree_backup")
    config.bind(SMALL)
    obs, space = gym.spaces.Dict({"observation": gym.spaces.Box(-1, 1, (6,))}), EVERY["several"]
    with pytest.raises(ValueError, match=naming("targets='tree_backup'", "Tuple")):
        amago.Agent(obs, rl2_space(action_spec(space)), space, 8, FFTstepEncoder, GRUTrajEncoder, targets="tree_backup")


def test_retrace_without_its_field_is_refused():
    agent = build("discrete", targets="retrace")
    with pytest.raises(ValueError, match=naming("targets='retrace'", "extra_fields", "'behaviour_log_prob'", "[]")):
        agent(make_batch("discrete"))


# ---- burn-in


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


def test_popart_leaves_burn_in_out():
    agent = build("discrete", GRUTrajEncoder, burn_in=2)
    batch = make_batch("discrete")
    batch.time_idxs = batch.time_idxs + 30
    batch.rews[:, :2] = 1e6
    agent.train()(batch)
    assert agent.popart.mu.abs().max() < 1e4


def test_a_run_with_burn_in_and_peng(tmp_path):
    config.bind({"Agent.burn_in": 2, "Agent.targets": "peng"})
    e = tiny.learned(tmp_path, tiny.cartpole, traj="gru", padded_sampling="both", train_timesteps_per_epoch=40)
    assert e.updater.grad_steps == 2


# ---- how fast values travel

STEPS, GAMMA = 40, 0.99


def corridors(n, seed=0, stop=0.05):
    """Corridors of `STEPS` steps: action 0 walks on, action 1 ends the rollout, and only the end of the corridor pays. The data end with
    the probability ``stop`` in each step."""
    g = torch.Generator().manual_seed(seed)
    action = (torch.rand(n, STEPS, generator=g) < stop).long()
    time = torch.arange(STEPS + 1)
    ends = torch.where(action.any(dim=1), action.argmax(dim=1), STEPS - 1)  # index of the last transition
    one_hot = torch.nn.functional.one_hot(action, 4).float()
    rews = torch.zeros(n, STEPS, 1)
    rews[(ends == STEPS - 1) & (action[:, -1] == 0), -1] = 1.0
    obs = torch.stack([torch.cos(time * k * torch.pi / STEPS) for k in range(1, 7)], dim=-1).expand(n, -1, -1)
    return amago.loading.Batch(
        obs={"mask": torch.ones(n, STEPS + 1, 4), "observation": obs}, rl2s=torch.zeros(n, STEPS + 1, 5), rews=rews,
        dones=(time[:-1] == ends[:, None])[..., None], actions=one_hot, time_idxs=time[None, :, None].expand(n, -1, -1),
        mask=(time <= ends[:, None] + 1)[..., None],
        extras={"behaviour_log_prob": torch.where(action == 0, 1.0 - stop, stop).log()},
    )  # fmt: skip


def value_of_the_first_step(updates, report=(), stop=0.05, **options):
    """The critics' value of walking on from the first step, as a share of the truth, after so many updates of 32 corridors."""
    config.bind(SMALL | {"FFTstepEncoder.normalize_inputs": False})
    torch.manual_seed(0)
    agent = build(
        "discrete",
        tau=0.01,
        gamma=GAMMA,
        use_multigamma=False,
        num_critics=2,
        reward_multiplier=100.0,
        offline_coeff=0.1,
        **options,
    )
    optimizer = torch.optim.AdamW(agent.trainable_params, 1e-3)
    found = []
    for n in range(1, updates + 1):
        agent.train()(corridors(32, n, stop)).backward()
        torch.nn.utils.clip_grad_norm_(agent.trainable_params, 2.0)
        optimizer.step()
        optimizer.zero_grad()
        agent.soft_sync_targets()
        if n in (*report, updates):
            whole = corridors(64, seed=12345)
            q = agent.get_values(whole).q[:, 0, -1, 0][whole.actions[:, 0, 0] == 1].mean().item()
            found.append(round(q / GAMMA ** (STEPS - 1), 3))
    return found if report else found[-1]


def test_values_travel_farther_than_with_one_reward():
    assert value_of_the_first_step(400) < 0.15
    assert value_of_the_first_step(400, targets="retrace") > 0.25
