"""Keys of nested observation spaces: each observation keeps its own, through conversion, JSON and files, or is refused with its path."""

import json

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import refused
from store_helpers import stored

from amago.data.trajectory import StoredTraj
from amago.spaces import ObsReader, describe, from_description, obs_spec
from amago.store import TrajectoryWriter

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
