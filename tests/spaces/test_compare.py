"""The differences between two pairs of spaces."""

import gymnasium.spaces as G
import numpy as np
import pytest

from amago.spaces import space_differences

OBS = G.Dict({"image": G.Box(0, 255, (4, 4), np.uint8), "x": G.Box(-1, 1, (3,), np.float32)})


def test_spaces_that_agree():
    assert space_differences((OBS, G.Discrete(3)), (OBS, G.Discrete(3))) == []


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


def test_dtypes_count_only_on_request_and_bounds_never():
    other = G.Dict({**OBS.spaces, "x": G.Box(-2, 2, (3,), np.float16)})
    first, second = (OBS, G.Discrete(3)), (other, G.Discrete(3, start=5))
    assert space_differences(first, second, dtypes=False) == []
    assert space_differences(first, second) == [("observation 'x'", "float32 (3,)", "float16 (3,)")]


def test_several_differences_are_sorted_by_name():
    found = space_differences((OBS, G.Discrete(3)), (G.Dict({"a": G.Box(0, 1)}), G.Discrete(2)))
    assert [d.name for d in found] == ["actions", "observation 'a'", "observation 'image'", "observation 'x'"]
