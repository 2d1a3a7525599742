"""What a mask forbids has a probability of exactly 0: in policies, exploration, data, evaluation, and after loading."""

import itertools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from composite_envs import SPACES, Rules, illegal_choices
from messages import refused
from support.nim import Nim

import amago
from amago import config
from amago.agent import Agent, MultiTaskAgent
from amago.data.batch import Batch
from amago.envs import AMAGOEnv
from amago.envs.exploration import BilevelEpsilonGreedy, EpsilonGreedy, ExplorationWrapper, made_legal
from amago.nets.actor_critic import Actor, BaseActorHead, ResidualActor
from amago.nets.policy_dists import Discrete
from amago.spaces import ActionMask, action_spec, check_mask

G = gym.spaces
RULES = {"discrete": G.Discrete(5, start=2), "multibinary": G.MultiBinary(4)} | SPACES
ALWAYS = {"EpsilonGreedy.randomize_eps": False, "EpsilonGreedy.eps_start": 1.0, "EpsilonGreedy.eps_end": 1.0}
AGENTS = pytest.mark.parametrize("agent_type", [Agent, MultiTaskAgent])


def test_an_illegal_choice_has_no_probability_at_all() -> None:
    kind, vec = Discrete(4), torch.randn(5000, 4, requires_grad=True)
    legal = torch.tensor([True, False, True, False]).expand(5000, 4)
    pi = kind(kind.masked(vec, legal))
    assert kind(torch.where(legal, vec, -torch.inf)).probs.equal(pi.probs)  # as actors of one's own do
    # where such an actor sees padding, nothing is legal
    nothing = torch.full((2, 4), -torch.inf, requires_grad=True)
    assert kind(nothing).probs.equal(torch.full((2, 4), 0.25))
    (kind(nothing).entropy().sum() + kind(nothing).sample_vector(grad=True).sum()).backward()
    assert nothing.grad.equal(torch.zeros(2, 4))
    clipped = kind(torch.where(legal, vec, -1e4)).probs[:, 1]  # as in the original
    torch.testing.assert_close(clipped, torch.full((5000,), 1e-3), rtol=0.01, atol=0.0)
    assert (pi.probs[:, [1, 3]] == 0).all()
    assert (pi.probs[:, [0, 2]] > 0).all()
    torch.testing.assert_close(pi.probs.sum(-1), torch.ones(5000))
    assert set(pi.sample()[:, 0].tolist()) == set(pi.mode.tolist()) == {0, 2}
    for drawn in (pi.sample_vector(), pi.sample_vector(grad=True)):
        assert (drawn[:, [1, 3]] == 0).all()
        assert set(drawn.argmax(-1).tolist()) == {0, 2}
    (pi.entropy().sum() + pi.log_prob(torch.ones(5000)).sum() + pi.sample_vector(grad=True).square().sum()).backward()
    assert vec.grad.isfinite().all()
    assert (vec.grad[:, [1, 3]] == 0).all()
    assert vec.grad[:, [0, 2]].abs().sum() > 0


def build(space: gym.Space[Any], agent_type: type[Any], **options: Any) -> Any:
    bindings = {"ActionMask.key": "mask", "ResidualActor.feature_dim": 16, "ResidualActor.residual_ff_dim": 16}
    return tiny.agent(AMAGOEnv(Rules(space)), agent_type=agent_type, bindings=bindings, **options)


def batch_of(space: gym.Space[Any], legal_data: bool = True, stored: bool = False) -> Batch:
    """Two sequences that were played at random, the second one shorter, and its padding zero."""
    env, spec = AMAGOEnv(Rules(space)), action_spec(space)
    rng, obs, actions = np.random.default_rng(0), [], []
    space.seed(0)
    for _ in range(2):
        ts, _ = env.reset(seed=0)
        for _ in range(7):
            obs.append({k: v[0] for k, v in ts.obs.items()})
            action = spec.from_env(space.sample())[None]
            action = made_legal(spec, action, ts.obs["mask"], rng) if legal_data else action
            actions.append(action[0] if stored else spec.to_vector(action[0]))
            ts, *_ = env.step(action)
    mask = torch.ones(2, 7, 1, dtype=torch.bool)
    mask[1, 4:] = False
    stacked = {k: torch.from_numpy(np.stack([o[k] for o in obs])).unflatten(0, (2, 7)) for k in obs[0]}
    for value in stacked.values():
        value[1, 4:] = 0
    return Batch(
        obs=stacked, rl2s=torch.zeros(2, 7, 1 + spec.dim), rews=torch.rand(2, 6, 1), dones=torch.zeros(2, 6, 1).bool(),
        actions=torch.from_numpy(np.stack(actions)).unflatten(0, (2, 7))[:, :6], time_idxs=torch.arange(7).expand(2, 7)[..., None],
        mask=mask,
    )  # fmt: skip


@AGENTS
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("legal_data", [True, False], ids=["legal", "illegal"])
def test_losses_and_gradients_stay_finite(name: str, agent_type: type[Any], legal_data: bool) -> None:
    """With padding, where nothing is legal, and with data that holds actions which are not; stored actions are as good as vectors."""
    losses = []
    for stored in (False, True):
        agent = build(RULES[name], agent_type, online_coeff=1.0, offline_coeff=1.0)
        batch = batch_of(RULES[name], legal_data, stored)
        loss = agent.losses(batch, log_step=True)
        losses.append(torch.cat([loss["actor"].flatten(), loss["critic"].flatten()]))
    assert losses[0].isfinite().all()
    torch.testing.assert_close(losses[0], losses[1])
    (loss["actor"].mean() + loss["critic"].mean()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in agent.trainable_params)
    assert all(v.isfinite().all() for v in agent.get_values(batch).values())


class Plain(BaseActorHead):
    """An actor that knows of no mask, and wants the clue."""

    def __init__(self, state_dim: int, action_dim: int, discrete: bool, gammas: torch.Tensor, action_kind: Any = None) -> None:
        super().__init__(state_dim, action_dim, discrete, gammas, action_kind=action_kind)
        self.out = torch.nn.Linear(state_dim + 2, self.d_output)

    def actor_network_forward(self, state: torch.Tensor, log_dict: Any = None, straight_from_obs: Any = None) -> torch.Tensor:
        assert list(straight_from_obs) == ["clue"]
        return self.out(torch.cat((state, straight_from_obs["clue"]), dim=-1)).unflatten(-1, (self.num_gammas, -1))


@pytest.mark.parametrize("actor_type", [Actor, ResidualActor, Plain])
def test_every_actor_obeys(actor_type: type[Any]) -> None:
    keys = ("clue",) if actor_type is Plain else ()
    agent = build(RULES["discrete"], Agent, actor_type=actor_type, pass_obs_keys_to_actor=keys)
    assert agent.pass_obs_keys_to_actor == [*keys, "mask"]
    agent.losses(batch_of(RULES["discrete"]))
    obs = {k: v[:, 0].repeat(500, *[1] * (v.ndim - 2)) for k, v in batch_of(RULES["discrete"]).obs.items()}
    for sample, g in itertools.product((True, False), range(2)):
        memory = agent.init_hidden_state(1000, "cpu")
        rl2s, time = torch.zeros(1000, 6), torch.zeros(1000, 1, dtype=torch.int64)
        actions, _ = agent.get_actions(obs, rl2s, time, memory, sample, gamma_idx=g)
        assert (obs["mask"][..., 0].gather(1, actions) == 1).all()


def test_masks_that_cannot_be() -> None:
    obs = G.Dict(mask=G.MultiBinary(5), clue=G.Box(0, 1, (2,)))
    check_mask("mask", obs, action_spec(G.Discrete(5)))
    for key, space, *named in (
        ("maks", G.Discrete(5), ["clue", "mask"]),
        ("mask", G.MultiDiscrete([2, 2]), (5,), 4, "MultiDiscrete([2 2])"),
        ("mask", G.Box(-1, 1, (5,)), "Box(-1.0, 1.0, (5,), float32)"),
    ):
        with refused(ValueError, f"ActionMask.key={key!r}", *named):
            check_mask(key, obs, action_spec(space))
    config.bind({"ActionMask.key": "nowhere"})
    assert ActionMask() == "nowhere"
    for wrap in (EpsilonGreedy, lambda env: BilevelEpsilonGreedy(env, 10)):
        with refused(ValueError, "ActionMask.key='nowhere'", ["action_mask", "heaps"]):
            wrap(AMAGOEnv(Nim()))
    with refused(ValueError, "ActionMask.key='nowhere'", "straight_from_obs", []):
        Actor(3, 2, True, torch.tensor([0.9]))(torch.zeros(1, 3))
    with refused(ValueError, "ActionMask", "'keys'"):
        config.bind({"ActionMask.keys": "mask"})


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("rows", [1, 3])
def test_exploration_takes_no_illegal_action(name: str, rows: int) -> None:
    config.bind(ALWAYS | {"ActionMask.key": "mask"})
    inner = [Rules(RULES[name]) for _ in range(rows)]
    if rows == 1:
        env = EpsilonGreedy(AMAGOEnv(inner[0]))
    else:
        env = EpsilonGreedy(AMAGOEnv(gym.vector.SyncVectorEnv([lambda e=e: e for e in inner]), "rules", rows))
    env.seed(0)
    env.reset(seed=0)
    for _ in range(300):
        *_, terminated, _, _ = env.step(env.action_spec.zeros(rows))
        if rows == 1 and terminated.item():
            env.reset()
    assert sum(e.illegal for e in inner) == 0
    assert sum(e.steps for e in inner) > 250 * rows
    if name == "discrete":
        config.bind({"ActionMask.key": None})
        env = EpsilonGreedy(AMAGOEnv(Rules(RULES[name])))
        env.reset(seed=0)
        for _ in range(10):
            env.step(env.action_spec.zeros(1))
        assert env.amago_env.env.illegal > 0  # that is what the mask is for


class Stubborn(ExplorationWrapper):
    """Exploration that knows of no mask."""

    def add_exploration_noise(self, action: Any, local_step: Any) -> Any:
        return np.full_like(action, 3)


def test_exploration_of_ones_own_obeys_too() -> None:
    config.bind({"ActionMask.key": "action_mask"})
    game = Nim(heaps=(6, 6), raise_if_illegal=True)
    env = Stubborn(AMAGOEnv(game))
    for _ in range(50):
        env.reset()
        done = False
        while not done:
            _, _, terminated, _, _ = env.step(np.zeros((1, 1), np.int64))
            done = terminated.item()
    assert game.illegal_moves == 0


def nim() -> AMAGOEnv:
    return AMAGOEnv(Nim(), env_name="Nim")


def nims() -> AMAGOEnv:
    return AMAGOEnv(gym.vector.SyncVectorEnv([Nim] * 2), env_name="Nim", batched_envs=2)


def illegal_in(e: Any, key: str = "action_mask") -> tuple[int, int]:
    """Illegal steps, and all steps, of everything that was collected."""
    view = e.dataset.store.view()
    trajs = [(view.read(i), view.action_spec(i)) for i in range(len(view))]
    return sum(illegal_choices(t, spec, key) for t, spec in trajs), sum(len(t) for t, _ in trajs)


@pytest.mark.parametrize(
    ("mode", "agent_type"), [("sync", Agent), ("sync", MultiTaskAgent), ("async", Agent), ("already_vectorized", Agent)]
)
def test_no_illegal_action_in_a_whole_run(mode: str, agent_type: type[Any], tmp_path: Any) -> None:
    config.bind({"EpsilonGreedy.eps_start": 0.6, "EpsilonGreedy.eps_end": 0.5, "ActionMask.key": "action_mask"})
    config.bind(tiny.TWO_HOT)
    make = nims if mode == "already_vectorized" else nim
    fields = {
        "env_mode": mode,
        "env_workers": 1 if mode == "async" else None,
        "agent_type": agent_type,
        "always_save_latest": True,
    }
    e = tiny.learned(tmp_path, make, "gru", epochs=2, train_timesteps_per_epoch=60, **fields)
    illegal, steps = illegal_in(e)
    assert illegal == 0
    assert steps > 100
    metrics = e.evaluate_test(make, timesteps=60)
    (measured,) = [v for k, v in metrics.items() if "Illegal Move" in k]
    assert measured == 0
    if mode == "sync":
        config.clear()  # load_policy needs no settings
        game = Nim(raise_if_illegal=True)
        for sample in (True, False):
            policy = amago.load_policy(tmp_path / "run", sample=sample)
            assert policy.agent.mask_key == "action_mask"
            for _ in range(10):
                obs, _ = game.reset()
                done, reward, policy_done = False, None, True
                while not done:
                    obs, reward, done, _, _ = game.step(policy.act(obs, reward, policy_done))
                    policy_done = False


@pytest.mark.parametrize("name", ["multibinary", "nested"])
def test_masks_of_several_parts_in_a_run(name: str, tmp_path: Any) -> None:
    config.bind({"EpsilonGreedy.eps_start": 0.6, "EpsilonGreedy.eps_end": 0.5, "ActionMask.key": "mask"})
    e = tiny.learned(tmp_path, lambda: AMAGOEnv(Rules(RULES[name])), train_timesteps_per_epoch=60)
    illegal, steps = illegal_in(e, "mask")
    assert illegal == 0
    assert steps >= 100
