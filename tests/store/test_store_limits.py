"""Which files a buffer deletes beyond its limits."""

from dataclasses import dataclass
from math import inf, nan

import numpy as np
import pytest

from amago.store.limits import Limits


@dataclass(frozen=True)
class File:
    n: int
    total: int
    size: int


def test_the_oldest_files_go_until_every_limit_holds_to_within_one_file():
    files = [File(2, 20, 200), File(1, 50, 100), File(3, 30, 900), File(1, 10, 100)]
    assert Limits().excess(files) == []
    assert Limits(trajectories=5).excess(files) == files[:1]
    assert Limits(steps=90).excess(files) == files[:1]
    assert Limits(steps=40).excess(files) == files[:2]
    assert Limits(bytes=1000).excess(files) == files[:2]
    assert Limits(trajectories=5, steps=40).excess(files) == files[:2]
    assert Limits(steps=0).excess(files) == files


def test_random_files_leave_less_than_one_file_beyond_a_limit():
    rng = np.random.default_rng(0)
    for _ in range(200):
        files = [File(*map(int, rng.integers(1, 50, 3))) for _ in range(int(rng.integers(1, 30)))]
        limits = Limits(*(float(x) for x in rng.integers(1, 600, 3)))
        gone = limits.excess(files)
        kept = files[len(gone) :]
        assert gone == files[: len(gone)]

        def sums(some):
            return sum(f.n for f in some), sum(f.total for f in some), sum(f.size for f in some)

        most = (limits.trajectories, limits.steps, limits.bytes)
        assert not any(have > m and left >= m for have, left, m in zip(sums(kept), sums(kept[1:]), most) if kept)
        if gone:  # the last file that went had to: a limit was still exceeded with it
            assert any(have > m for have, m in zip(sums(files[len(gone) - 1 :]), most))


@pytest.mark.parametrize("name", ["trajectories", "steps", "bytes"])
@pytest.mark.parametrize("limit", [-1, nan, -inf])
def test_what_is_no_limit_is_refused(name, limit):
    with pytest.raises(ValueError, match=f"max_{name} is {limit}, but must be at least 0"):
        Limits(**{name: limit})
