"""Actions of several parts, from the environment to disk, to the networks and back."""

from __future__ import annotations

import json
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from composite_envs import KINDS, SPACES, Lock, make_lock, make_locks, numbers
from messages import naming

import amago
from amago import config
from amago.agent import Agent, MultiTaskAgent
from amago.data.batch import Batch
from amago.data.trajectory import StoredTraj
from amago.envs import AMAGOEnv
from amago.envs.exploration import EpsilonGreedy
from amago.loading import DiskTrajDataset
from amago.loading.sources import Converter
from amago.nets.policy_dists import GMM, Discrete, Multibinary, TanhGaussian
from amago.nets.product import Product, distribution_of
from amago.spaces import NonFiniteError, action_spec, describe, from_description, stored_width

G = gym.spaces
NAMES = pytest.mark.parametrize("name", SPACES)
MORE = {
    "grid": G.MultiDiscrete(np.array([[2, 3], [3, 2]]), start=np.array([[0, 1], [-1, 5]]), dtype=np.int32),
    "one": G.Tuple((G.Discrete(3),)),
    "bits": G.Dict(a=G.MultiBinary(2), b=G.MultiBinary([2, 2])),
    "boxes": G.Dict(a=G.Box(-1, 1, ()), b=G.Box(0, 5, (2, 2))),
    "large": G.Dict(id=G.Discrete(2**40 + 7), x=G.Box(-1, 1, (1,))),
}
DTYPES = {
    "multidiscrete": np.int64, "tuple": np.float64, "dict": np.int64, "nested": np.float64, "grid": np.int64, "one": np.int64,
    "bits": np.int8, "boxes": np.float32, "large": np.float64,
}  # fmt: skip


@pytest.mark.parametrize("name", [*SPACES, *MORE])
def test_an_action_survives_every_form(name: str) -> None:
    space = (SPACES | MORE)[name]
    spec = action_spec(space)
    space.seed(0)
    assert spec.stored_dtype == DTYPES[name]
    assert spec.parts[-1].stored.stop == spec.stored_dim
    assert spec.parts[-1].vector.stop == spec.dim
    for _ in range(20):
        action = space.sample()
        stored = spec.from_env(action)
        assert stored.shape == (spec.stored_dim,)
        assert stored.dtype == spec.stored_dtype
        spec.check(stored)
        back = spec.to_env(stored)
        np.testing.assert_allclose(numbers(space, back), numbers(space, action), rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(spec.from_env(spec.to_env(spec.from_env(back))), spec.from_env(back))
        if name != "large":  # whose one-hot would take terabytes
            vector = spec.to_vector(stored)
            assert vector.shape == (spec.dim,)
            assert vector.dtype == np.float32
            np.testing.assert_array_equal(spec.from_vector(vector), stored)
            assert sum(vector[p.vector].sum() for p in spec.parts if p.kind == "discrete") == sum(
                p.kind == "discrete" for p in spec.parts
            )
    text = json.dumps(describe(space), sort_keys=True)
    assert from_description(json.loads(text)) == space
    assert stored_width(json.loads(text)) == spec.stored_dim
    assert action_spec(from_description(json.loads(text))).kind == spec.kind


@NAMES
def test_kinds_say_what_an_action_is_made_of(name: str) -> None:
    assert action_spec(SPACES[name]).kind == KINDS[name]


def test_large_indices_are_exact_beside_continuous_numbers() -> None:
    spec = action_spec(MORE["large"])
    action = {"id": 2**40 + 1, "x": np.array([0.1], np.float32)}
    back = spec.to_env(spec.from_env(action))
    assert back["id"] == 2**40 + 1
    assert back["x"] == np.float32(0.1)


@NAMES
def test_batches_are_rows_side_by_side(name: str) -> None:
    space, spec = SPACES[name], action_spec(SPACES[name])
    batched = gym.vector.utils.batch_space(space, 3)
    batched.seed(1)
    actions = batched.sample()
    stored = spec.from_env(actions)
    assert stored.shape == (3, spec.stored_dim)
    out = spec.to_env(stored)
    assert batched.contains(out)
    for row, one in zip(stored, gym.vector.utils.iterate(batched, out)):
        np.testing.assert_array_equal(numbers(space, spec.to_env(row)), numbers(space, one))
    np.testing.assert_array_equal(spec.to_vector(stored), [spec.to_vector(row) for row in stored])
    np.testing.assert_array_equal(spec.from_vector(spec.to_vector(stored)), stored)


def test_the_order_of_a_dict_is_that_of_its_sorted_keys() -> None:
    spec = action_spec(G.Dict([("b", G.Discrete(2)), ("a", G.Discrete(3))]))
    assert spec.kind == "discrete(3)+discrete(2)"
    np.testing.assert_array_equal(spec.from_env({"b": 1, "a": 2}), [2, 1])
    assert spec.to_env(np.array([2, 1])) == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("column", "value", "error", "named"),
    [
        (0, 1.5, ValueError, ("action[0]", "(a/0)", 1.5, [-1, 1])),
        (0, np.nan, NonFiniteError, ("action[0]", "(a/0)", "nan")),
        (1, 2, ValueError, ("action[1]", "(a/1/on[0])", 2.0, 0, 1)),
        (3, 0.5, ValueError, ("action[3]", "(a/1/pick)", 0.5, 0, 2)),
        (5, 3, ValueError, ("action[5]", "(z[1])", 3.0, 0, 2)),
        (5, np.inf, NonFiniteError, ("action[5]", "(z[1])", "inf")),
    ],
)
def test_wrong_actions_say_which_part(column: int, value: float, error: type[Exception], named: tuple[Any, ...]) -> None:
    spec = action_spec(SPACES["nested"])
    stored = spec.zeros(1)[0]
    spec.check(stored)
    stored[column] = value
    with pytest.raises(error, match=naming(*named)):
        spec.check(stored)
    env = AMAGOEnv(Lock("nested"))
    env.reset()
    with pytest.raises(error, match=naming("Lock, step 1", *named)):
        env.step(stored[None])


def test_wrong_spaces_and_dtypes() -> None:
    with pytest.raises(ValueError, match=naming("float64", "int64")):
        action_spec(SPACES["dict"]).check(np.zeros(4))
    with pytest.raises(ValueError, match=naming("Tuple()", "empty")):
        action_spec(G.Tuple(()))
    with pytest.raises(TypeError, match=naming("key 3", "str")):
        action_spec(G.Dict({3: G.Discrete(2)}))
    with pytest.raises(ValueError, match="unbounded"):
        action_spec(G.Tuple((G.Discrete(2), G.Box(-np.inf, np.inf, (1,)))))
    with pytest.raises(TypeError, match="Text"):
        action_spec(G.Dict(a=G.Text(3)))
    with pytest.raises(ValueError, match=naming("action_kind='discrete(2)+box(3)'")):
        distribution_of("discrete(2)+box(3)", 5, TanhGaussian)
    with pytest.raises(ValueError, match=naming("action_kind='discrete(2)+discrete(3)'", 5, 6)):
        distribution_of("discrete(2)+discrete(3)", 6, TanhGaussian)


# ---- policies ------------------------------------------------------------------------------------------------------------------


def product(lead: tuple[int, ...] = (2, 3)) -> tuple[Any, torch.Tensor]:
    spec = action_spec(SPACES["nested"])
    kind = distribution_of(spec.kind, spec.dim, TanhGaussian)
    assert isinstance(kind, Product)
    torch.manual_seed(0)
    vec = torch.randn(*lead, kind.input_dimension, requires_grad=True)
    return kind, vec


def test_a_product_is_its_factors_side_by_side() -> None:
    kind, vec = product()
    pi = kind(vec, log_dict=(log := {}))
    factors = [TanhGaussian(1), Multibinary(2), Discrete(3), Discrete(2), Discrete(3)]
    ours, at = [], 0
    for f in factors:
        ours.append(f(vec[..., at : at + f.input_dimension]))
        at += f.input_dimension
    assert at == kind.input_dimension
    box, bits, pick, first, second = ours
    index = [torch.tensor([[2, 0, 1], [1, 1, 0]]), torch.tensor([[1, 0, 1], [0, 1, 0]]), torch.tensor([[0, 2, 1], [1, 0, 2]])]
    hots = [torch.nn.functional.one_hot(i, n).float() for i, n in zip(index, (3, 2, 3))]
    number, on = torch.rand(2, 3, 1) * 1.8 - 0.9, torch.randint(0, 2, (2, 3, 2)).float()
    vector = torch.cat([number, on, *hots], dim=-1)
    expected = [
        box.log_prob(number).sum(-1),
        bits.log_prob(on).mean(-1),
        *(d.log_prob(i) for d, i in zip((pick, first, second), index)),
    ]
    torch.testing.assert_close(pi.log_prob(vector), torch.stack(expected, dim=-1))
    torch.testing.assert_close(pi.log_prob_of_vector(vector), torch.stack(expected).sum(0).unsqueeze(-1))
    clipped = torch.cat([number, on, *(Discrete(h.shape[-1]).action_from_buffer(h) for h in hots)], dim=-1)
    torch.testing.assert_close(kind.action_from_buffer(vector), clipped)
    torch.testing.assert_close(pi.clip_like_policy(vector), clipped)
    entropies = torch.stack([d.entropy() for d in (pick, first, second)]).sum(0) + bits.entropy().sum(-1)
    torch.testing.assert_close(log["Policy Entropy"], entropies.mean())
    torch.testing.assert_close(log["Policy Std (before tanh)"], box.scale.mean())
    with pytest.raises(NotImplementedError, match="TanhGaussianOutput"):
        pi.entropy()


def test_samples_follow_the_parts_probabilities() -> None:
    kind, vec = product((1,))
    pi = kind(vec.detach().expand(20_000, -1))
    spec = action_spec(SPACES["nested"])
    stored = pi.sample_action(True)
    assert stored.dtype == torch.float64
    spec.check(stored.numpy())
    for drawn in (torch.from_numpy(spec.to_vector(stored.numpy())), pi.sample(), pi.sample_vector()):
        mean = drawn.mean(0)
        for part, factor in zip(spec.parts[1:], pi.factors[1:]):
            torch.testing.assert_close(mean[part.vector], factor.probs[0], atol=0.02, rtol=0)
    mode = pi.sample_action(False)
    spec.check(mode.numpy())
    np.testing.assert_array_equal(mode[0].numpy(), mode[-1].numpy())
    np.testing.assert_allclose(spec.to_vector(mode.numpy()), pi.mode.numpy())


def test_gradients_reach_every_part() -> None:
    kind, vec = product()
    for scalar in (lambda pi: pi.sample_vector(grad=True).square().sum(), lambda pi: pi.log_prob_of_vector(pi.sample()).sum()):
        vec.grad = None
        scalar(kind(vec)).backward()
        assert (vec.grad.abs().sum((0, 1)) > 0).all()
    assert not kind(vec).sample_vector().requires_grad
    spec = action_spec(SPACES["nested"])
    assert kind.actions_differentiable
    assert not distribution_of(spec.kind, spec.dim, GMM).actions_differentiable


# ---- agents --------------------------------------------------------------------------------------------------------------------


def build(name: str, agent_type: type[Any]) -> Any:
    return tiny.agent(AMAGOEnv(Lock(name)), agent_type=agent_type, max_seq_len=4, use_multigamma=True)


def batch_of(name: str, stored_form: bool) -> Batch:
    space, spec = SPACES[name], action_spec(SPACES[name])
    rng = np.random.default_rng(3)
    space.seed(3)
    stored = np.stack([[spec.from_env(space.sample()) for _ in range(3)] for _ in range(2)])
    width = Lock(name).blank.size
    vector = torch.from_numpy(spec.to_vector(stored))
    return Batch(
        obs={"time": torch.zeros(2, 4, 1), "took": torch.from_numpy(rng.normal(size=(2, 4, width)).astype(np.float32))},
        rl2s=torch.zeros(2, 4, 1 + spec.dim),
        rews=torch.from_numpy(rng.normal(size=(2, 3, 1)).astype(np.float32)),
        dones=torch.zeros(2, 3, 1, dtype=torch.bool),
        actions=torch.from_numpy(stored) if stored_form else vector,
        time_idxs=torch.arange(4).expand(2, 4).unsqueeze(-1),
        mask=torch.ones(2, 4, 1),
    )


@NAMES
@pytest.mark.parametrize("agent_type", [Agent, MultiTaskAgent])
def test_losses_reach_everything_that_is_trained(name: str, agent_type: type[Any]) -> None:
    losses = []
    for stored_form in (False, True):
        agent = build(name, agent_type)
        torch.manual_seed(1)
        loss = agent.losses(batch_of(name, stored_form), log_step=True)
        assert loss.actor_loss.shape == (2, 3, 2, 1)
        assert loss.critic_loss.shape == (2, 3, 4, 2, 1)
        losses.append(torch.cat([loss.actor_loss.flatten(), loss.critic_loss.flatten()]))
    assert losses[0].isfinite().all()
    torch.testing.assert_close(losses[0], losses[1])
    (loss.actor_loss.mean() + loss.critic_loss.mean()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in agent.trainable_params)
    values = agent.get_values(batch_of(name, False))
    assert values.q.shape == values.v.shape == (2, 3, 2, 1)


@NAMES
def test_actions_in_stored_form_mean_the_same(name: str) -> None:
    agent = build(name, Agent)
    of_vectors, of_stored, of_others = batch_of(name, False), batch_of(name, True), batch_of(name, True)
    of_others.actions = of_others.actions.roll(1, dims=1)
    values = []
    for batch in (of_vectors, of_stored, of_others):
        torch.manual_seed(1)
        values.append(agent.get_values(batch))
    torch.testing.assert_close(values[0].q, values[1].q, atol=0, rtol=0)
    torch.testing.assert_close(values[0].advantage, values[1].advantage, atol=0, rtol=0)
    assert not torch.allclose(values[0].q, values[2].q)


# ---- exploration ---------------------------------------------------------------------------------------------------------------


@NAMES
def test_exploration_changes_each_part_in_its_own_way(name: str) -> None:
    config.bind({"EpsilonGreedy.randomize_eps": False, "EpsilonGreedy.eps_start": 1.0, "EpsilonGreedy.eps_end": 1.0})
    env = EpsilonGreedy(make_locks(name, 2, 10_000)())
    env.seed(0)
    env.reset(seed=0)
    spec = env.action_spec
    policy = spec.zeros(2)
    taken = []
    for _ in range(1000):
        before = policy.copy()
        env.step(policy)
        np.testing.assert_array_equal(policy, before)
        assert env.amago_env.last_action.dtype == spec.stored_dtype
        spec.check(env.amago_env.last_action)
        taken.append(env.amago_env.last_action.copy())
    vectors = spec.to_vector(np.concatenate(taken))
    np.testing.assert_array_equal(spec.from_vector(vectors), np.concatenate(taken))
    for part in spec.parts:
        column = vectors[:, part.vector]
        if part.kind == "discrete":
            np.testing.assert_allclose(column.mean(0), 1 / part.dim, atol=0.05)
        elif part.kind == "multibinary":
            assert (column == 1).all()  # zeros, flipped with certainty
        else:
            assert 0.5 < column.std() < 0.85
            assert np.abs(column).max() == 1.0


# ---- end to end ----------------------------------------------------------------------------------------------------------------


def check_recorded(name: str, traj: StoredTraj) -> None:
    """What was stored is what the environment took."""
    space, spec = SPACES[name], action_spec(SPACES[name])
    assert traj.actions.dtype == spec.stored_dtype
    took = np.stack([numbers(space, spec.to_env(a)) for a in traj.actions])
    np.testing.assert_array_equal(took, traj.obs["took"][1:])
    frozen = traj.derive(spec).validate()
    np.testing.assert_array_equal(frozen.rl2s[1:, 1:], spec.to_vector(traj.actions))
    again = frozen.to_stored(spec)
    np.testing.assert_array_equal(again.actions, traj.actions)
    assert again.actions.dtype == traj.actions.dtype


STEPS = 6
RUNS = [
    ("multidiscrete", "sync", "npz", Agent), ("tuple", "sync", "segments", Agent), ("dict", "sync", "npz-compressed", MultiTaskAgent),
    ("nested", "sync", "segments", MultiTaskAgent), ("nested", "async", "npz", Agent), ("nested", "already_vectorized", "npz", Agent),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mode", "files", "agent_type"), RUNS, ids=["-".join(r[:3]) for r in RUNS])
def test_a_run_collects_stores_trains_saves_and_acts(
    name: str, mode: str, files: str, agent_type: type[Any], tmp_path: Any
) -> None:
    make = make_locks(name, 2, STEPS) if mode == "already_vectorized" else make_lock(name, STEPS)
    fields = {"env_mode": mode, "env_workers": 1 if mode == "async" else None, "save_trajs_as": files, "agent_type": agent_type}
    config.bind(tiny.TWO_HOT)
    e = tiny.learned(tmp_path, make, "gru", ckpt_interval=1, always_save_latest=True, val_interval=1, **fields)
    view = e.dataset.store.view()
    assert len(view) == (2 if mode == "already_vectorized" else 4)  # a batch takes a step to reset itself
    for i in range(len(view)):
        assert view.action_spec(i).space == SPACES[name]
        check_recorded(name, view.read(i))
    policy = amago.load_policy(tmp_path / "run", sample=False)
    env, again = Lock(name, STEPS), amago.load_policy(tmp_path / "run", sample=False)
    obs, _ = env.reset(seed=0)
    done, reward = False, None
    while not done:
        action = policy.act(obs, reward)
        np.testing.assert_array_equal(numbers(SPACES[name], action), numbers(SPACES[name], again.act(obs, reward)))
        obs, reward, done, _, _ = env.step(action)
    assert e.evaluate_test(make, timesteps=STEPS + 1)
    before = tiny.weights(e)
    e.close()
    resumed = tiny.started(tmp_path, make, "gru", resume="auto", epochs=2, **fields)
    assert resumed.epoch == 1
    assert not tiny.differing(before, tiny.weights(resumed))
    resumed.learn()
    assert tiny.differing(before, tiny.weights(resumed))


def test_a_buffer_of_other_parts_is_refused(tmp_path: Any) -> None:
    tiny.learned(tmp_path, make_lock("multidiscrete", STEPS), always_save_latest=False).close()
    with pytest.raises(ValueError, match=naming("discrete(3)+discrete(4)", 7)):
        tiny.started(
            tmp_path, lambda: AMAGOEnv(Other()), name="other", dataset=DiskTrajDataset(tmp_path, "run"), share_buffer=True
        )


class Other(Lock):
    """Observations of the same shape, and actions of the same width."""

    def __init__(self) -> None:
        super().__init__("multidiscrete", STEPS)
        self.action_space = G.MultiDiscrete([4, 3])


@NAMES
def test_recordings_from_elsewhere(name: str) -> None:
    space, spec = SPACES[name], action_spec(SPACES[name])
    batched = gym.vector.utils.batch_space(space, 5)
    batched.seed(2)
    actions = batched.sample()
    converter = Converter(G.Box(-1, 1, (2,)), space)
    obs, rewards, ends = np.zeros((6, 2), np.float32), np.arange(5.0), np.array([False] * 4 + [True])
    traj = converter.convert("episode 0", obs, actions, rewards, ends, "lock")
    assert traj.actions.dtype == spec.stored_dtype
    np.testing.assert_array_equal(traj.actions, spec.from_env(actions))
    assert converter.clipped == 0
    if name == "tuple":
        far = (actions[0], actions[1] + 10.0)
        np.testing.assert_array_equal(converter.convert("far", obs, far, rewards, ends, "lock").actions[:, 1:], np.ones((5, 2)))
        assert converter.clipped == 5
        with pytest.raises(ValueError, match=naming("wrong", "action[0, 0]", 2)):
            converter.convert("wrong", obs, (actions[0] + 3, actions[1]), rewards, ends, "lock")
        with pytest.raises(ValueError, match=naming("broken", "action[0, 1]", "(1[0])", "nan")):
            converter.convert("broken", obs, (actions[0], actions[1] * np.nan), rewards, ends, "lock")


LEARNERS = [("multidiscrete", Agent), ("tuple", Agent), ("dict", Agent), ("nested", Agent), ("nested", MultiTaskAgent)]


@pytest.mark.parametrize(("name", "agent_type"), LEARNERS, ids=[f"{n}-{a.__name__}" for n, a in LEARNERS])
def test_the_combination_is_learned(name: str, agent_type: type[Any], tmp_path: Any) -> None:
    config.bind(
        {
            "NCriticsTwoHot.d_hidden": 16, "NCriticsTwoHot.output_bins": 16, "NCriticsTwoHot.min_return": -1.0,
            "NCriticsTwoHot.max_return": 12.0, "EpsilonGreedy.steps_anneal": 200, "Agent.use_multigamma": False,
            "MultiTaskAgent.use_multigamma": False, "Agent.tau": 0.02, "MultiTaskAgent.tau": 0.02,
        }
    )  # fmt: skip
    e = tiny.learned(
        tmp_path, make_lock(name), agent_type=agent_type, parallel_actors=16, epochs=12, train_timesteps_per_epoch=16, max_seq_len=1,
        train_batches_per_epoch=25, batch_size=32, learning_rate=5e-3, sample_actions=False,
    )  # fmt: skip
    result = e.evaluate_test(make_lock(name), timesteps=2)
    assert result["Average Total Return in lock"] > 0.93, result
