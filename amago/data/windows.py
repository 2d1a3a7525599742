"""Which transitions of a trajectory a training sequence has (numpy only)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PADDED_SAMPLING = ("none", "both", "left", "right")


def subsequence(
    length: int,
    max_len: int,
    padded_sampling: str,
    rng: np.random.Generator,
    cut_short: bool = False,
    piece: tuple[int, int] = (0, 1),
) -> tuple[int, int]:
    """Choose the transitions [start, stop) of a trajectory to train on.

    All of a trajectory with T <= L. Of a longer one, the window of ``max_len`` transitions starts uniformly in [0, T - L]
    ("none"), [-L + 1, T - 2] ("both"), [-L + 1, T - L] ("left") or [0, T - 2] ("right"), and is then cut to what exists. "left"
    and "both" make the first steps of a trajectory, "right" and "both" its last, as likely to be in the window as any other.

    Args:
        length: T, transitions in the trajectory.
        max_len: L.
        cut_short: draw a window of a trajectory with T <= L in the same way. With "both", half of the trajectory is then missing
            on average where T = L: what an agent has to remember and what it is for are hardly ever in one sequence.
        piece: (k, K): the start is drawn from the k-th of K equal parts of its range, k from 0.
    """
    if length <= max_len and not cut_short:
        return 0, length
    low = 1 - max_len if padded_sampling in ("both", "left") else 0
    high = length - 2 if padded_sampling in ("both", "right") else length - max_len
    starts, (k, pieces) = max(high, low) + 1 - low, piece
    start = int(rng.integers(low + k * starts // pieces, low + (k + 1) * starts // pieces))
    return max(start, 0), min(start + max_len, length)


def expected_transitions(
    lengths: NDArray[np.int64], max_len: int, padded_sampling: str, cut_short: bool = False
) -> NDArray[np.float64]:
    """The mean number of transitions that `subsequence` chooses of a trajectory, over its random starts.

    Args:
        lengths: (n,), T of each trajectory, at least 1.
        max_len, padded_sampling, cut_short: as there.

    Returns:
        (n,): L for T > L with "none", and at most T.
    """
    lengths = np.asarray(lengths, np.int64)
    low = 1 - max_len if padded_sampling in ("both", "left") else 0
    high = np.maximum(lengths - 2 if padded_sampling in ("both", "right") else lengths - max_len, low)
    after = lengths - max_len  # a window that starts after this has start - after transitions less than L at the end
    lost = _sum_to(after - low) - _sum_to(after - high - 1) + _sum_to(high) - _sum_to(low - 1)
    mean = lengths - lost / (high - low + 1)
    return mean if cut_short else np.where(lengths <= max_len, lengths, mean)


def pieces_of(lengths: NDArray[np.int64], max_len: int, padded_sampling: str, cut_short: bool = False) -> NDArray[np.int64]:
    """Into how many sequences, T / L rounded up, each trajectory divides: the K of `subsequence` with one start in each part at least."""
    lengths = np.asarray(lengths, np.int64)
    low = 1 - max_len if padded_sampling in ("both", "left") else 0
    high = np.maximum(lengths - 2 if padded_sampling in ("both", "right") else lengths - max_len, low)
    return np.minimum(-(-lengths // max_len), high - low + 1)


def _sum_to(n: NDArray[np.int64] | int) -> NDArray[np.float64]:
    """1 + 2 + ... + n; 0 for n below 1."""
    positive = np.maximum(n, 0).astype(np.float64)
    return positive * (positive + 1) / 2


def check_padded_sampling(value: str) -> None:
    """Raise ValueError, naming the value, unless it is one of `PADDED_SAMPLING`."""
    if value not in PADDED_SAMPLING:
        raise ValueError(f"padded_sampling must be one of {', '.join(PADDED_SAMPLING)}; got {value!r}")
