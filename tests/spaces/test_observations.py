import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import check_refused, naming, refused

from amago.spaces import action_spec, from_description, obs_spec


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


@pytest.mark.parametrize(
    ("space", "obs", "named"),
    [
        (gym.spaces.Box(0, 1, (2,)), np.zeros(3, np.float32), ("'observation'", "shape", (3,), (2,))),
        (gym.spaces.Box(0, 255, (2,), np.uint8), np.zeros(2), ("'observation'", "dtype", "float64", "uint8")),
        (gym.spaces.Dict(a=gym.spaces.Discrete(2)), {"b": 0}, ("missing ['a']", "['b']")),
        (gym.spaces.Dict(a=gym.spaces.Discrete(2)), np.zeros(2), ("['a']", "ndarray")),
        (gym.spaces.Discrete(2), 2, ("'observation'", "2", "Discrete(2)")),
        (gym.spaces.MultiDiscrete([2, 2]), np.array([0, 2]), ("'observation'", "[0 2]", "MultiDiscrete([2 2])")),
    ],
)
def test_wrong_observations_say_which_key_and_what_is_right(space, obs, named):
    with refused(ValueError, *named):
        obs_spec(space).convert(obs)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int32, np.int64, np.float32, np.float64])
def test_lists_of_numbers_are_observations(dtype):
    spec = obs_spec(gym.spaces.Box(0, 100, (2,), dtype))
    assert spec.convert([3, 100])["observation"].tolist() == [3, 100]
    assert spec.convert(np.array([3, 100]))["observation"].dtype == spec.space["observation"].dtype


def test_what_is_no_observation_or_no_description_is_refused():
    narrow = obs_spec(gym.spaces.Box(0, 255, (2,), np.uint8))
    bad = ({}, {"kind": "Text"}, {"kind": "Discrete"}, {"kind": "Box", "shape": [2]}, {"kind": "Dict", "spaces": 3})
    check_refused(
        ValueError,
        *((naming(n, "uint8"), lambda n=n: narrow.convert([3, n])) for n in (-1, 256)),
        *(("space", lambda d=d: from_description(d)) for d in bad),
    )
    check_refused(
        TypeError,
        (naming("'mission'", "Text", "FilterObservation"), lambda: obs_spec(gym.spaces.Dict(mission=gym.spaces.Text(10)))),
        (naming("obs[(1, 2)]", "tuple"), lambda: obs_spec(gym.spaces.Dict({(1, 2): gym.spaces.Discrete(2)}))),
    )
