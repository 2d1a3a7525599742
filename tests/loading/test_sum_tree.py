"""A sum tree draws what a plain array of weights would, after any changes."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import naming

from amago.loading.sum_tree import SumTree

WHOLE = st.integers(0, 5).map(float)  # sums of whole numbers are exact, in any order
ANY = st.one_of(st.just(0.0), st.floats(0, 1e6, allow_subnormal=False))


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 40))
def test_as_a_plain_array(data, n):
    plain = np.array(data.draw(st.lists(WHOLE, min_size=n, max_size=n)))
    tree = SumTree(plain)
    for _ in range(data.draw(st.integers(0, 5))):
        rows = data.draw(st.lists(st.integers(0, n - 1), max_size=8))
        new = data.draw(st.lists(WHOLE, min_size=len(rows), max_size=len(rows)))
        tree.set(rows, new)
        for row, weight in zip(rows, new):
            plain[row] = weight
        assert tree.total == plain.sum()
        np.testing.assert_array_equal(tree.weights, plain)
    for mass in np.arange(0, plain.sum(), 0.5):
        assert tree.find(mass) == np.searchsorted(np.cumsum(plain), mass, side="right")
    assert [tree[i] for i in range(n)] == plain.tolist()


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 40), st.integers(0, 2**32))
def test_what_has_no_weight_is_never_drawn_and_history_does_not_matter(data, n, seed):
    weights = np.array(data.draw(st.lists(ANY, min_size=n, max_size=n)))
    tree = SumTree(np.ones(n))
    for row in data.draw(st.permutations(range(n))):
        tree.set([row], weights[row])
    if not weights.any():
        with pytest.raises(ValueError):
            tree.draw(np.random.default_rng(seed))
        return
    drawn = [tree.draw(rng) for rng in [np.random.default_rng(seed)] for _ in range(20)]
    assert all(weights[i] > 0 for i in drawn)
    assert weights[tree.find(tree.total)] > 0, "rounding may ask for all of the mass"
    anew = SumTree(weights)
    assert anew.total == tree.total
    assert drawn == [anew.draw(rng) for rng in [np.random.default_rng(seed)] for _ in range(20)]


def test_wrong_weights_and_indices_are_refused_and_change_nothing():
    tree = SumTree([1.0, 2.0])
    for rows, weights, error in (
        ([0], [-1.0], ValueError),
        ([0], [np.nan], ValueError),
        ([0, 2], [5.0, 5.0], IndexError),
        ([-1], [5.0], IndexError),
    ):
        with pytest.raises(error):
            tree.set(rows, weights)
    assert tree.weights.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match=naming(np.inf)):
        SumTree([1.0, np.inf])
    with pytest.raises(IndexError, match=naming(2)):
        tree[2]


def test_no_weights_at_all():
    tree = SumTree([])
    assert (len(tree), tree.total) == (0, 0.0)
    with pytest.raises(ValueError):
        tree.find(0.0)


def test_a_million_weights_are_not_read_for_each_draw():
    tree, rng = SumTree(np.ones(10**6)), np.random.default_rng(0)
    start = time.process_time()
    for _ in range(2000):
        tree.set([tree.draw(rng)], 2.0)
    assert time.process_time() - start < 2.0, "a sum over all weights each time would take several seconds"
