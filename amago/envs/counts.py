"""Returns, lengths, metrics and steps of rollouts in progress."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amago.envs.autoreset import Info
from amago.envs.statistics import EpisodeRecord, MetricSums, collect_row, collect_rows

Array = NDArray[Any]


class Counts:
    """Returns, lengths, metrics and steps of B rows.

    Attributes:
        tick: steps of the whole batch, ever.
        began: (B,) tick at which each row's rollout opened.
        ret: (B,) its return so far.
        metrics, names: what it has logged so far, and its environment's name.
        total_frames: steps by environment name, ever; `count_frames` brings it up to date.
        ended: rollouts that have ended, ever.
    """

    def __init__(self, rows: int, actor: int):
        self.tick, self._actor = 0, actor
        self.began = np.zeros(rows, dtype=np.int64)
        self._counted = np.zeros(rows, dtype=np.int64)  # tick up to which each row's steps are in _frames
        self.ret = np.zeros(rows)
        self.metrics = [MetricSums() for _ in range(rows)]
        self.names = [""] * rows  # until a rollout begins: an environment may not know its name before
        self._episodes: list[EpisodeRecord] = []
        self.ended = 0
        self._frames: dict[str, int] = {}
        self.total_frames: dict[str, int] = {}

    @property
    def in_progress(self) -> int:
        return int((self.tick > self.began).sum())

    def begin(self, rows: Array, names: list[str]) -> None:
        """New rollouts open in these rows; ``names`` are those of all rows."""
        self.began[rows] = self._counted[rows] = self.tick
        self.ret[rows] = 0.0
        changed = set(rows.tolist())
        self.names = [new if row in changed else old for row, (old, new) in enumerate(zip(self.names, names))]
        for row in changed:
            self.metrics[row] = MetricSums()

    def collect(self, infos: Iterable[Info], vectorized: bool) -> None:
        """Add what environments log in their infos."""
        for info, rows in infos:
            if info and vectorized:
                collect_rows(info, rows, self.metrics)
            elif info:
                collect_row(info, self.metrics[0])

    def finish(self, row: int, terminated: bool) -> None:
        """Make the record of a rollout that ended with the latest step."""
        self.count_frames((row,))
        length, metrics = self.tick - int(self.began[row]), self.metrics[row].means()
        record = EpisodeRecord(self.names[row], float(self.ret[row]), length, metrics, self._actor + row, terminated)
        self._episodes.append(record)
        self.ended += 1

    def close_row(self, row: int) -> None:
        """Nothing is in progress in a row until `begin`."""
        self.began[row], self.ret[row], self.metrics[row] = self.tick, 0.0, MetricSums()

    def count_frames(self, rows: Iterable[int]) -> None:
        for row in rows:
            n = self.tick - int(self._counted[row])
            if n > 0:
                name = self.names[row]
                for frames in (self._frames, self.total_frames):
                    frames[name] = frames.get(name, 0) + n
            self._counted[row] = self.tick

    def last(self, n: int) -> list[EpisodeRecord]:
        """The n rollouts that ended last; they must have ended since the last `drain`."""
        return self._episodes[-n:] if n else []

    @property
    def episodes(self) -> list[EpisodeRecord]:
        """The rollouts that have ended since the last `drain` or `forget_episodes`."""
        return list(self._episodes)

    def forget_episodes(self) -> None:
        """Drop the rollouts that have ended; their steps stay counted."""
        self._episodes = []

    def drain(self) -> tuple[list[EpisodeRecord], dict[str, int]]:
        out = self._episodes, self._frames
        self._episodes, self._frames = [], {}
        return out
