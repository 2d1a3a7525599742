"""The differences between two pairs of spaces."""

import gymnasium.spaces as G
import numpy as np
import pytest

from amago.spaces import same_range, space_differences

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


def test_dtypes_and_ranges_count_only_on_request():
    other = G.Dict({**OBS.spaces, "x": G.Box(-2, 2, (3,), np.float16)})
    first, second = (OBS, G.Discrete(3)), (other, G.Discrete(3, start=5))
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


@pytest.mark.parametrize("name", SAME)
def test_ranges_of_what_may_be_the_same_data(name):
    a, b = SAME[name]
    assert same_range(a, b)
    assert same_range(b, a)


@pytest.mark.parametrize("name", OTHER)
def test_ranges_of_other_units(name):
    a, b = OTHER[name]
    assert not same_range(a, b)
    assert not same_range(b, a)
    one, two = (G.Dict({"x": x}) for x in (a, b))
    [found] = space_differences((one, G.Discrete(2)), (two, G.Discrete(2)), ranges=True)
    assert found.name == "observation 'x'"
    assert found.first != found.second
