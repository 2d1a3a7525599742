"""Collectors are divided among nodes by their sizes, and move as little as possible."""

import pytest

from amago.distributed.shares import assign, shares


@pytest.mark.parametrize(
    ("total", "sizes", "expected"),
    [
        (4, {"a": 2, "b": 2}, {"a": 2, "b": 2}),
        (3, {"a": 1, "b": 2}, {"a": 1, "b": 2}),
        (10, {"a": 64, "b": 16}, {"a": 8, "b": 2}),
        (1, {"a": 4, "b": 8, "c": 4}, {"a": 0, "b": 1, "c": 0}),
        (5, {"a": 1, "b": 1}, {"a": 3, "b": 2}),
    ],
)
def test_shares_follow_the_sizes(total, sizes, expected):
    assert shares(total, sizes) == expected


@pytest.mark.parametrize("total", [1, 7, 64, 1000])
def test_shares_are_the_total(total):
    sizes = {f"n{i}": 0.25 + i % 7 for i in range(13)}
    assert sum(shares(total, sizes).values()) == total


def moves(before, after):
    return sum(before[i] != after[i] for i in before)


def test_a_node_that_joins_takes_its_share_and_no_other_collector_moves():
    before = assign(6, {"a": 4, "b": 4}, {})
    after = assign(6, {"a": 4, "b": 4, "c": 4}, before)
    assert sorted(after.values()) == ["a", "a", "b", "b", "c", "c"]
    assert moves(before, after) == 2


def test_the_collectors_of_a_lost_node_go_to_the_others():
    before = assign(6, {"a": 4, "b": 4, "c": 4}, {})
    after = assign(6, {"a": 4, "c": 4}, before)
    assert sorted(after.values()) == ["a", "a", "a", "c", "c", "c"]
    assert moves(before, after) == 2


def test_without_a_change_nobody_moves():
    before = assign(7, {"a": 4, "b": 3}, {})
    assert assign(7, {"b": 3, "a": 4}, before) == before
