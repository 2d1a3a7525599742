import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import check_refused, naming

from amago.data.batch import subsequence
from amago.loading import Batch, RLData, collate


def sequence(length, fill=1.0):
    return RLData(
        obs={"a": torch.full((length + 1, 2), fill), "img": torch.full((length + 1, 2, 2, 1), 7, dtype=torch.uint8)},
        rl2s=torch.full((length + 1, 3), fill), time_idxs=torch.arange(length + 1)[:, None], rews=torch.full((length, 1), fill),
        dones=torch.zeros(length, 1, dtype=torch.bool), actions=torch.full((length, 2), fill),
    )  # fmt: skip


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_the_mask_says_what_is_real(lengths):
    batch = collate([sequence(n) for n in lengths])
    longest = max(lengths)
    assert batch.mask.shape == (len(lengths), longest + 1, 1)
    for i, n in enumerate(lengths):
        assert batch.mask[i, :, 0].tolist() == [True] * (n + 1) + [False] * (longest - n)
        assert (batch.transition_mask[i].sum(), batch.rews[i, :n].sum()) == (n, n)
        assert batch.obs["a"][i, : n + 1].eq(1).all()
    assert (batch.obs["img"].dtype, batch.dones.dtype) == (torch.uint8, torch.bool)


@pytest.mark.parametrize(
    ("padded", "starts"),
    [("none", range(7)), ("both", range(-3, 9)), ("left", range(-3, 7)), ("right", range(9))],
)
def test_windows_are_uniform_over_the_documented_starts(padded, starts):
    length, max_len = 10, 4
    rng = np.random.default_rng(0)
    draws = 6000
    seen: dict = {}
    for _ in range(draws):
        window = subsequence(length, max_len, padded, rng)
        seen[window] = seen.get(window, 0) + 1
    want: dict = {}
    for s in starts:
        window = (max(s, 0), min(s + max_len, length))
        want[window] = want.get(window, 0) + 1
    assert set(seen) == set(want)
    for window, share in want.items():
        p = share / len(starts)
        assert abs(seen[window] - draws * p) < 5 * np.sqrt(draws * p * (1 - p))


def test_what_does_not_fit_is_refused():
    without, real, double = sequence(3), sequence(3), sequence(3)
    without.obs.pop("img")
    real.obs["img"], double.rews = torch.full((4, 2, 2, 1), 0.7), double.rews.double()
    parts = vars(collate([sequence(3)]))
    check_refused(
        ValueError,
        ("no sequences", lambda: collate([])),
        (naming("observations", ["a"], ["a", "img"]), lambda: collate([sequence(3), without])),
        (naming("obs['img']", "torch.uint8", "torch.float32"), lambda: collate([sequence(3), real])),
        (naming("rews", "torch.float64", "torch.float32"), lambda: collate([double, sequence(3)])),
        (naming("Batch.dones", (1, 2, 1), (1, 3, 1)), lambda: Batch(**(parts | {"dones": torch.zeros(1, 2, 1).bool()}))),
    )
    assert Batch(**(parts | {"mask": torch.ones(1, 4, 1)})).mask.dtype == torch.bool
    moved = collate([sequence(2)]).to("meta")
    assert {moved.rews.device.type, moved.obs["a"].device.type, moved.mask.device.type} == {"meta"}
