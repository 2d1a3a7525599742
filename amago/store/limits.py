"""How much a buffer keeps: limits in trajectories, steps and bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Protocol, TypeVar


class Sized(Protocol):
    """A file: its trajectories, their transitions in all, and its bytes."""

    @property
    def n(self) -> int: ...

    @property
    def total(self) -> int: ...

    @property
    def size(self) -> int: ...


F = TypeVar("F", bound=Sized)


@dataclass(frozen=True)
class Limits:
    """The most that a buffer keeps. Each limit may be infinite; all of them hold at the same time.

    Attributes:
        trajectories: number of trajectories.
        steps: transitions of all trajectories.
        bytes: size of all files.

    Raises:
        ValueError: a limit is negative or not a number.
    """

    trajectories: float = inf
    steps: float = inf
    bytes: float = inf

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ValueError(f"max_{name} is {value}, but must be at least 0")

    def excess(self, files: Iterable[F]) -> list[F]:
        """The files to delete, oldest first: the fewest after which none of the remaining could go without falling below a limit
        that is exceeded. Whole files are deleted, so each sum may remain above its limit by less than one file.

        Args:
            files: the oldest first.
        """
        every = list(files)
        trajectories, steps, size = sum(f.n for f in every), sum(f.total for f in every), sum(f.size for f in every)
        kept = [(trajectories, self.trajectories), (steps, self.steps), (size, self.bytes)]

        def goes(file: F) -> bool:
            after = [(have - less, most) for (have, most), less in zip(kept, (file.n, file.total, file.size))]
            drop = any(have > most and left >= most for (have, most), (left, _) in zip(kept, after))
            if drop:
                kept[:] = after
            return drop

        return list(itertools.takewhile(goes, every))
