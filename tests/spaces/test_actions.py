"""Actions of several parts, from the environment to disk, to the networks and back."""

import json
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tiny
from composite_envs import SPACES, Lock, make_lock, make_locks, numbers
from messages import check_refused, naming, refused

import amago
from amago import config
from amago.agent import Agent, MultiTaskAgent
from amago.data.trajectory import StoredTraj
from amago.envs import AMAGOEnv
from amago.envs.exploration import EpsilonGreedy
from amago.loading.offline.base import Converter
from amago.nets.policy_dists import TanhGaussian, distribution_of
from amago.spaces import NonFiniteError, action_spec, describe, from_description

G = gym.spaces
NAMES = pytest.mark.parametrize("name", SPACES)
MORE = {
    "discrete": G.Discrete(70_000, start=-5),
    "box": G.Box(np.array([0.0, -1.0]), np.array([1.0, 4.0]), dtype=np.float64),
    "number": G.Box(0.0, 5.0, ()),
    "multibinary": G.MultiBinary([2, 3]),
    "grid": G.MultiDiscrete(np.array([[2, 3], [3, 2]]), start=np.array([[0, 1], [-1, 5]]), dtype=np.int32),
    "one": G.Tuple((G.Discrete(3),)),
    "bits": G.Dict(a=G.MultiBinary(2), b=G.MultiBinary([2, 2])),
    "boxes": G.Dict(a=G.Box(-1, 1, ()), b=G.Box(0, 5, (2, 2))),
    "large": G.Dict(id=G.Discrete(2**40 + 7), x=G.Box(-1, 1, (1,))),
}
DTYPES = {
    "discrete": np.int64, "box": np.float32, "number": np.float32, "multibinary": np.int8,
    "multidiscrete": np.int64, "tuple": np.float64, "dict": np.int64, "nested": np.float64, "grid": np.int64, "one": np.int64,
    "bits": np.int8, "boxes": np.float32, "large": np.float64,
}  # fmt: skip


@pytest.mark.parametrize("name", [*SPACES, *MORE])
def test_an_action_survives_every_form(name: str) -> None:
    space = (SPACES | MORE)[name]
    spec = action_spec(space)
    space.seed(0)
    assert (spec.stored_dtype, spec.parts[-1].stored.stop) == (DTYPES[name], spec.stored_dim)
    assert spec.parts[-1].vector.stop == spec.dim
    for _ in range(20):
        action = space.sample()
        stored = spec.from_env(action)
        assert (stored.shape, stored.dtype) == ((spec.stored_dim,), spec.stored_dtype)
        spec.check(stored)
        back = spec.to_env(stored)
        np.testing.assert_allclose(numbers(space, back), numbers(space, action), rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(spec.from_env(spec.to_env(spec.from_env(back))), spec.from_env(back))
        if name != "large":  # whose one-hot would take terabytes
            vector = spec.to_vector(stored)
            assert (vector.shape, vector.dtype) == ((spec.dim,), np.float32)
            np.testing.assert_array_equal(spec.from_vector(vector), stored)
            assert sum(vector[p.vector].sum() for p in spec.parts if p.kind == "discrete") == sum(
                p.kind == "discrete" for p in spec.parts
            )
    text = json.dumps(describe(space), sort_keys=True)
    assert from_description(json.loads(text)) == space
    assert action_spec(from_description(json.loads(text))).kind == spec.kind


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


WHOLE = {
    "bool": G.Box(0, 1, (2,), bool), "bits": G.Box(0, 1, (1,), np.int8), "digits": G.Box(-5, 5, (1,), np.int64),
    "bytes": G.Box(0, 255, (1,), np.uint8), "mixed": G.Box(np.array([0, 3]), np.array([9, 4]), dtype=np.int32),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_every_whole_number_of_a_box_is_taken_and_comes_back(name: str) -> None:
    space = WHOLE[name]
    spec = action_spec(space)
    low, high = space.low.astype(int), space.high.astype(int)
    unit = np.linspace(-1, 1, 20_001, dtype=np.float32)[:, None].repeat(spec.dim, 1)
    taken = spec.to_env(unit)
    assert taken.dtype == space.dtype
    for column in range(spec.dim):
        values, counts = np.unique(taken[:, column].astype(int), return_counts=True)
        np.testing.assert_array_equal(values, np.arange(low[column], high[column] + 1))
        assert counts.min() > 0.45 * counts.mean()
        assert abs(taken[:, column].astype(float).mean() - (low[column] + high[column]) / 2) < 1e-3
    again = spec.to_env(spec.from_env(taken))
    np.testing.assert_array_equal(again, taken)


@pytest.mark.parametrize("bound", [2**24, 2**31 - 1, 2**49])
@pytest.mark.parametrize("nested", [False, True])
def test_wide_ranges_of_whole_numbers_come_back_as_they_were(bound: int, nested: bool) -> None:
    box = G.Box(-bound, bound - 1, (3,), np.int64)
    spec = action_spec(G.Dict(a=box) if nested else box)
    action = np.array([-bound, 12_345_678 % bound, bound - 1])
    back = spec.to_env(spec.from_env({"a": action} if nested else action))
    np.testing.assert_array_equal(back["a"] if nested else back, action)


@pytest.mark.parametrize(
    "space",
    [
        G.Box(0, 2**60, (1,), np.int64),
        G.Box(2**53, 2**53 + 4, (1,), np.int64),
        G.Box(-1e308, 1e308, (1,), np.float64),
        G.Dict(a=G.Box(0, 2**62, (1,), np.uint64)),
    ],
)
def test_ranges_that_float64_cannot_hold_are_refused(space: gym.Space[Any]) -> None:
    with refused(ValueError, "range that float64 cannot hold"):
        action_spec(space)


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
    with refused(error, *named):
        spec.check(stored)
    env = AMAGOEnv(Lock("nested"))
    env.reset()
    with refused(error, "Lock, step 1", *named):
        env.step(stored[None])


def test_wrong_spaces_and_dtypes() -> None:
    check_refused(
        ValueError,
        (naming("float64", "int64"), lambda: action_spec(SPACES["dict"]).check(np.zeros(4))),
        (naming("unbounded", "RescaleAction"), lambda: action_spec(G.Box(-np.inf, np.inf, (1,), np.int64))),
        (naming("Tuple()", "empty"), lambda: action_spec(G.Tuple(()))),
        ("unbounded", lambda: action_spec(G.Tuple((G.Discrete(2), G.Box(-np.inf, np.inf, (1,)))))),
        (naming("action_kind='discrete(2)+box(3)'"), lambda: distribution_of("discrete(2)+box(3)", 5, TanhGaussian)),
        (
            naming("action_kind='discrete(2)+discrete(3)'", 5, 6),
            lambda: distribution_of("discrete(2)+discrete(3)", 6, TanhGaussian),
        ),
    )
    check_refused(
        TypeError,
        (naming("key 3", "str"), lambda: action_spec(G.Dict({3: G.Discrete(2)}))),
        ("Text", lambda: action_spec(G.Dict(a=G.Text(3)))),
    )


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
    ("multidiscrete", "sync", "npz", Agent), ("dict", "sync", "npz-compressed", MultiTaskAgent), ("tuple", "async", "segments", Agent),
    ("nested", "already_vectorized", "npz", Agent),
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


def test_recordings_from_elsewhere() -> None:
    space = SPACES["tuple"]
    batched = gym.vector.utils.batch_space(space, 5)
    batched.seed(2)
    index, numbers = batched.sample()
    converter = Converter(G.Box(-1, 1, (2,)), space)

    def convert(name: str, *actions: Any) -> Any:
        return converter.convert(name, np.zeros((6, 2), np.float32), actions, np.arange(5.0), np.arange(5) == 4, "lock").actions

    np.testing.assert_array_equal(convert("episode 0", index, numbers), action_spec(space).from_env((index, numbers)))
    assert converter.clipped == 0
    np.testing.assert_array_equal(convert("far", index, numbers + 10.0)[:, 1:], np.ones((5, 2)))
    assert converter.clipped == 5
    with refused(ValueError, "wrong", "action[0, 0]", 2):
        convert("wrong", index + 3, numbers)
    with refused(ValueError, "broken", "actions", "step 0"):
        convert("broken", index, numbers * np.nan)


def test_the_combination_is_learned(tmp_path: Any) -> None:
    config.bind(
        {
            "NCriticsTwoHot.d_hidden": 16, "NCriticsTwoHot.output_bins": 16, "NCriticsTwoHot.min_return": -1.0,
            "NCriticsTwoHot.max_return": 12.0, "EpsilonGreedy.steps_anneal": 200,
            "MultiTaskAgent.use_multigamma": False, "MultiTaskAgent.tau": 0.02,
        }
    )  # fmt: skip
    e = tiny.learned(
        tmp_path, make_lock("nested"), agent_type=MultiTaskAgent, parallel_actors=16, epochs=12, train_timesteps_per_epoch=16, max_seq_len=1,
        train_batches_per_epoch=25, batch_size=32, learning_rate=5e-3, sample_actions=False,
    )  # fmt: skip
    result = e.evaluate_test(make_lock("nested"), timesteps=2)
    assert result["Average Total Return in lock"] > 0.93, result
