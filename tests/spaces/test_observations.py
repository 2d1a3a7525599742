"""Observation spaces: conversion, keys of nested ones, differences between two."""

import json

import gymnasium as gym
import gymnasium.spaces as G
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import check_refused, naming, refused
from store_helpers import stored

from amago.data.trajectory import StoredTraj
from amago.spaces import ObsReader, action_spec, describe, from_description, obs_spec, same_range, space_differences
from amago.store import TrajectoryWriter


@given(st.lists(st.floats(-1, 1, width=32), min_size=3, max_size=3))
def test_scaled_actions_never_leave_the_box(unit):
    space = gym.spaces.Box(np.array([-1.1, 0.0, 7.0], np.float32), np.array([3.3, 1e-3, 7.0], np.float32))
    assert space.contains(action_spec(space).to_env(np.array(unit, dtype=np.float32)))


def test_plain_spaces_become_dicts_of_boxes():
    for space, sample, want in (
        (gym.spaces.Box(-1, 1, (2,), np.float64), np.array([0.5, 1.0]), [0.5, 1.0]),
        (gym.spaces.Discrete(4, start=2), 3, [0, 1, 0, 0]),
        (gym.spaces.MultiDiscrete([2, 3]), np.array([1, 2]), [0, 1, 0, 0, 1]),
        (gym.spaces.MultiBinary(3), np.array([1, 0, 1]), [1, 0, 1]),
    ):
        spec = obs_spec(space)
        out = spec.convert(sample)
        np.testing.assert_array_equal(out["observation"], want)
        assert out["observation"].dtype == np.float32
        assert spec.space["observation"].contains(out["observation"])


def test_nested_spaces_get_joined_keys_in_alphabetical_order():
    space = gym.spaces.Dict(
        z=gym.spaces.Discrete(2), a=gym.spaces.Dict(y=gym.spaces.Box(0, 1, (1,)), x=gym.spaces.Box(0, 255, (2, 2), np.uint8))
    )
    spec = obs_spec(space)
    assert list(spec.space.spaces) == ["a/x", "a/y", "z"]
    out = spec.convert({"z": 1, "a": {"y": np.zeros(1, np.float32), "x": np.full((2, 2), 7, np.uint8)}})
    assert out["a/x"].dtype == np.uint8
    np.testing.assert_array_equal(out["z"], [0, 1])


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(2, 6), st.integers(0, 99))
def test_batched_observations_convert_row_by_row(batch, n, seed):
    space = gym.spaces.Dict(d=gym.spaces.Discrete(n), m=gym.spaces.MultiDiscrete([n, 2]))
    one, many = obs_spec(space), obs_spec(space, batched=True)
    rng = np.random.default_rng(seed)
    rows = [{"d": int(rng.integers(n)), "m": np.array([rng.integers(n), rng.integers(2)])} for _ in range(batch)]
    together = many.convert({"d": np.array([r["d"] for r in rows]), "m": np.stack([r["m"] for r in rows])})
    for i, row in enumerate(rows):
        for key, value in one.convert(row).items():
            np.testing.assert_array_equal(together[key][i], value)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int32, np.int64, np.float32, np.float64])
def test_lists_of_numbers_are_observations(dtype):
    spec = obs_spec(gym.spaces.Box(0, 100, (2,), dtype))
    assert spec.convert([3, 100])["observation"].tolist() == [3, 100]
    assert spec.convert(np.array([3, 100]))["observation"].dtype == spec.space["observation"].dtype


def test_what_is_no_observation_or_no_description_is_refused():
    """More than `bad_input_cases.py` has."""
    narrow = obs_spec(gym.spaces.Box(0, 255, (2,), np.uint8))
    bad = ({}, {"kind": "Text"}, {"kind": "Discrete"}, {"kind": "Box", "shape": [2]}, {"kind": "Dict", "spaces": 3})
    check_refused(
        ValueError,
        *((naming(n, "uint8"), lambda n=n: narrow.convert([3, n])) for n in (-1, 256)),
        (
            naming("'observation'", "[0 2]", "MultiDiscrete([2 2])"),
            lambda: obs_spec(S.MultiDiscrete([2, 2])).convert(np.array([0, 2])),
        ),
        *(("space", lambda d=d: from_description(d)) for d in bad),
    )
    check_refused(
        TypeError,
        (naming("'mission'", "Text", "FilterObservation"), lambda: obs_spec(gym.spaces.Dict(mission=gym.spaces.Text(10)))),
        (naming("obs[(1, 2)]", "tuple"), lambda: obs_spec(gym.spaces.Dict({(1, 2): gym.spaces.Discrete(2)}))),
    )


S = gym.spaces
KEYS = st.one_of(st.sampled_from(["a", "b", "a/b", "1", "", "é", "e\u0301", "/", "..", "\0", "\\", " ", "a\x85b", "\ud800", "observation"]), st.integers(-2, 2), st.text(max_size=3))  # fmt: skip
SPACES = st.recursive(
    st.integers(1, 4).map(lambda n: S.Box(-1.0, 1.0, (n,), np.float32)),
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, min_size=1, max_size=4).map(S.Dict), st.lists(inner, min_size=1, max_size=2).map(S.Tuple)
    ),
    max_leaves=6,
)


def leaves(value):
    if isinstance(value, dict | tuple):
        return [leaf for part in (value.values() if isinstance(value, dict) else value) for leaf in leaves(part)]
    return [value.tobytes()]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SPACES)
def test_every_observation_comes_back_or_its_space_is_refused(tmp_path_factory, space):
    space.seed(0)
    obs = space.sample()
    try:
        spec = obs_spec(space)
    except ValueError:  # `test_names_that_become_one...` reads the message
        return
    flat = spec.convert(obs)
    assert sorted(leaves(flat)) == sorted(leaves(obs)), "nothing is lost, and nothing is there twice"
    again = from_description(json.loads(json.dumps(describe(space))))
    assert again == space
    read = ObsReader(spec.space, again, None)(obs)
    assert {k: v[0].tobytes() for k, v in read.items()} == {k: v.tobytes() for k, v in flat.items()}
    for save_as in ("segments", "npz"):
        root = tmp_path_factory.mktemp("buffer")
        writer = TrajectoryWriter(root / "fifo", writer="w", action_space=S.Discrete(2), obs_space=spec.space, save_as=save_as)
        rows = {k: np.stack([v, v]) for k, v in flat.items()}
        writer.write(StoredTraj(rows, np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32), np.ones((1, 1), bool)))
        writer.close()
        found = stored(root)[0].obs
        assert {k: v[1].tobytes() for k, v in found.items()} == {k: v.tobytes() for k, v in flat.items()}


BOX = S.Box(-1.0, 1.0, (2,), np.float32)


@pytest.mark.parametrize(
    ("space", "paths"),
    [
        (S.Dict({"a/b": BOX, "a": S.Dict({"b": BOX})}), ("obs['a/b']", "obs['a']['b']")),
        (S.Dict({1: BOX, "1": S.Discrete(3)}), ("obs[1]", "obs['1']")),
        (S.Dict({"a": S.Tuple((BOX, BOX)), "a/1": BOX}), ("obs['a'][1]", "obs['a/1']")),
        (S.Dict({"": BOX, "observation": BOX}), ("obs['']", "obs['observation']")),
        (S.Dict({"x": S.Dict({"a\0": BOX})}), ("obs['x']['a\\x00']",)),
    ],
)
def test_names_that_become_one_are_refused_with_both_paths(space, paths):
    with refused(ValueError, *paths):
        obs_spec(space)


OBS = G.Dict({"image": G.Box(0, 255, (4, 4), np.uint8), "x": G.Box(-1, 1, (3,), np.float32)})


@pytest.mark.parametrize(
    ("obs", "actions", "expected"),
    [
        (OBS, G.Discrete(4), ("actions", "discrete of width 3", "discrete of width 4")),
        (OBS, G.MultiBinary(3), ("actions", "discrete of width 3", "multibinary of width 3")),
        (G.Dict({"image": OBS["image"]}), G.Discrete(3), ("observation 'x'", "float32 (3,)", "missing")),
        (G.Dict({**OBS.spaces, "y": G.Box(0, 1)}), G.Discrete(3), ("observation 'y'", "missing", "float32 (1,)")),
        (G.Dict({**OBS.spaces, "x": G.Box(-1, 1, (2,))}), G.Discrete(3), ("observation 'x'", "float32 (3,)", "float32 (2,)")),
    ],
)
def test_each_difference_is_named(obs, actions, expected):
    assert space_differences((OBS, G.Discrete(3)), (obs, actions)) == [expected]


def test_dtypes_and_ranges_count_only_on_request():
    other = G.Dict({**OBS.spaces, "x": G.Box(-2, 2, (3,), np.float16)})
    first, second = (OBS, G.Discrete(3)), (other, G.Discrete(3, start=5))
    assert space_differences(first, first) == []
    assert space_differences(first, second, dtypes=False) == []
    assert space_differences(first, second) == [("observation 'x'", "float32 (3,)", "float16 (3,)")]


def box(low, high, dtype=np.float32):
    return G.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)


INF, MAX = np.inf, float(np.finfo(np.float32).max)
SAME = {
    "equal": (box([0, 0], [1, 1]), box([0, 0], [1, 1])),
    "rounded": (box([0.1], [0.7]), box([0.1 + 1e-7], [0.7 - 1e-7])),
    "unbounded": (box([0, 0], [255, 1]), box([-INF, -INF], [INF, INF])),
    "unbounded above": (box([0], [1]), box([0], [INF])),
    "the greatest float": (box([-1], [1]), box([-MAX], [MAX])),
    "a generous million": (box([-1], [1]), box([-1e6], [1e6])),
    "ten times as wide": (box([-1, -1], [1, 1]), box([-10, -1], [10, 1])),
    "a little outside": (box([-5.1], [5]), box([-5], [5.2])),
    "signed or not": (box([0], [1]), box([-1], [1])),
    "a constant": (box([0], [0]), box([0], [1])),
    "counts": (box([0], [1], np.uint8), box([0], [255], np.uint8)),
}
OTHER = {
    "pixels": (box([0, 0], [1, 1]), box([0, 0], [255, 255])),
    "pixels around 0": (box([-1], [1]), box([0], [255])),
    "degrees": (box([-np.pi], [np.pi]), box([-180], [180])),
    "an offset": (box([0], [1]), box([-0.5], [0.5])),
    "apart": (box([0], [1]), box([5], [6])),
    "one of several": (box([-1, -INF], [1, INF]), box([-1000, -INF], [1000, INF])),
}


@pytest.mark.parametrize("name", SAME | OTHER)
def test_ranges_of_the_same_data_and_of_other_units(name):
    a, b = (SAME | OTHER)[name]
    assert same_range(a, b) is same_range(b, a) is (name in SAME)
    one, two = (G.Dict({"x": x}) for x in (a, b))
    found = space_differences((one, G.Discrete(2)), (two, G.Discrete(2)), ranges=True)
    assert [x.name for x in found] == ["observation 'x'"] * (name in OTHER)
    assert all(x.first != x.second for x in found)
