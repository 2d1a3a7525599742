"""The log of a run as tables of limited size, filled row by row: a log of any length can be read, and read on while it grows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amago.run.metric_names import AVERAGE_RETURN

Array = NDArray[np.float64]
POSITION = ("epoch", "env_steps", "grad_steps", "wall_time")
"""What says where in a run a row stands, in the order of the columns of `Table.position`."""
LIMIT = 400
"""Most rows of a table. Beyond, neighbours are merged into their mean."""
SUMMED = ("Restarted Environments", "Dropped Rollouts")
"""Faults that are counted for each phase by itself."""
COUNTED = ("Skipped Updates", "quarantined")
"""Faults that are counted from the start of the run (or of the process) on: the newest value is the sum."""
PHASES = {"rollout": "collection", "train": "training", "val": "evaluation", "test": "evaluation"}
_WAITING = 1_000


class Table:
    """Rows of one section, with neighbours merged into means where there are more than ``limit``.

    Attributes:
        names: {metric: column}, in the order in which metrics were first written.
        rows: (n,) how many rows of the log are in each row of the table.
    """

    def __init__(self, limit: int = LIMIT):
        self.limit, self.names = limit, dict[str, int]()
        self._merged = 1  # rows of the log in each row but the last
        self._waiting: list[tuple[tuple[float, ...], Mapping[str, Any]]] = []
        self.rows: Array = np.zeros(0)
        self._position: Array = np.zeros((0, len(POSITION)))  # sums
        self._sums: Array = np.zeros((0, 0))
        self._counts: Array = np.zeros((0, 0))

    def add(self, position: tuple[float, ...], values: Mapping[str, Any]) -> None:
        """Add a row.

        Args:
            position: as `POSITION`.
            values: numbers, or None where one was not finite.
        """
        self._waiting.append((position, values))
        if len(self._waiting) >= _WAITING:
            self._fold()

    def _fold(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        for _, values in waiting:
            if values.keys() - self.names.keys():
                for name in values:
                    self.names.setdefault(name, len(self.names))
        names = list(self.names)
        new = np.array([[values.get(name) for name in names] for _, values in waiting], np.float64)
        new = new.reshape(len(waiting), len(names))
        wider = ((0, 0), (0, len(names) - self._sums.shape[1]))
        self._sums, self._counts = np.pad(self._sums, wider), np.pad(self._counts, wider)
        known = np.isfinite(new)
        start = (len(self.rows) - 1) * self._merged + int(self.rows[-1]) if len(self.rows) else 0
        into = (start + np.arange(len(waiting))) // self._merged
        more = int(into[-1]) + 1 - len(self.rows)
        parts = [self.rows, self._position, self._sums, self._counts]
        grown = [np.concatenate([part, np.zeros((more, *part.shape[1:]))]) for part in parts]
        added = [np.ones(len(waiting)), np.array([p for p, _ in waiting], np.float64), np.where(known, new, 0.0), known]
        for whole, part in zip(grown, added):
            np.add.at(whole, into, part)
        self.rows, self._position, self._sums, self._counts = grown
        while len(self.rows) > self.limit:
            self._halve()

    def _halve(self) -> None:
        starts = np.arange(0, len(self.rows), 2)
        parts = (self.rows, self._position, self._sums, self._counts)
        self.rows, self._position, self._sums, self._counts = (np.add.reduceat(part, starts, axis=0) for part in parts)
        self._merged *= 2

    @property
    def position(self) -> Array:
        """(n, 4) the mean `POSITION` of each row."""
        self._fold()
        return self._position / self.rows[:, None]

    def column(self, axis: str, name: str) -> tuple[Array, Array]:
        """The values of a metric, and where they stand on an axis of `POSITION`; both (n,), empty if there is no value."""
        position = self.position
        if name not in self.names:
            return np.zeros(0), np.zeros(0)
        column = self.names[name]
        known = self._counts[:, column] > 0
        y = self._sums[known, column] / self._counts[known, column]
        return position[known, POSITION.index(axis)], y

    def cut(self, position: tuple[float, ...]) -> None:
        """Drop the rows at and after a position: epoch, steps and updates count."""
        at = self.position
        kept = ~(at[:, :3] >= np.array(position[:3])).all(axis=1)
        self.rows, self._position = self.rows[kept], self._position[kept]
        self._sums, self._counts = self._sums[kept], self._counts[kept]

    def metric_names(self) -> list[str]:
        """The metrics, in the order in which they were first written."""
        self._fold()
        return list(self.names)


class Log:
    """What `read_run` and `amago watch` keep of a ``metrics.jsonl``.

    A run that was killed goes on from its last training state, so that positions go back; the rows after that state then belong to
    nothing that still exists, and are dropped.

    Attributes:
        sections: {section: its table}.
        track: positions of all rows.
        rows: rows read, dropped ones included.
        highest: (4,) the highest of each `POSITION`.
        latest: {section: values of its newest row with a mean return}.
        newest: {section: position of its newest row}.
        faults: {name of `SUMMED` or `COUNTED`: how often}.
        seconds: {"collection", "training", "evaluation": seconds spent}. The log has a row at the end of each phase; the time
            between a stop and a resume is not in it.
        went_back: how often a run that was killed has gone on from an earlier state.
        several: processes that count on their own write this log (a learner and collectors), so that times do not add up.
        not_finite: values that were infinite or NaN.
        complete: False while only a part of a long file has been read.
    """

    def __init__(self, limit: int = LIMIT):
        self.limit = limit
        self.sections: dict[str, Table] = {}
        self.track = Table(limit)
        self.rows = self.went_back = self.not_finite = 0
        self.highest: tuple[float, ...] = (0, 0, 0, 0.0)
        self.latest: dict[str, Mapping[str, Any]] = {}
        self.newest: dict[str, tuple[float, ...]] = {}
        self.faults: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.several = False
        self.complete = True
        self._last: tuple[float, ...] = (0, 0, 0, 0.0)

    def add(self, row: Any) -> None:
        """Add a row.

        Raises:
            ValueError: it is no row of a log.
        """
        try:
            position = row["epoch"], row["env_steps"], row["grad_steps"], row["wall_time"]
            sum(position)  # numbers
            section, values = row["section"], row["values"]
            if not isinstance(values, dict) or not isinstance(section, str):
                raise TypeError("section must be a string, and values an object")
            for value in values.values():
                if value.__class__ is float:
                    continue
                if value is None:
                    self.not_finite += 1
                elif not isinstance(value, int | float):
                    raise TypeError(f"{value!r} is no number")
        except (KeyError, TypeError) as err:
            raise ValueError(f"no row of a log: {err}") from err
        self.rows += 1
        self._compare(position)
        if section not in self.sections:
            self.sections[section] = Table(self.limit)
        self.sections[section].add(position, values)
        self.track.add(position, {})
        phase = PHASES.get(section)
        if phase is not None:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + max(0.0, position[3] - self._last[3])
        self._last = position
        self.highest = tuple(map(max, self.highest, position))
        self.newest[section] = position
        if values.get(AVERAGE_RETURN) is not None:
            self.latest[section] = values
        for name in SUMMED:
            if name in values:
                self.faults[name] = self.faults.get(name, 0.0) + (values[name] or 0.0)
        for name in COUNTED:
            if values.get(name) is not None:
                # a row may hold the mean over its updates
                self.faults[name] = float(np.ceil(values[name] - 1e-6))

    def _compare(self, position: tuple[float, ...]) -> None:
        """Drop what a run that went back has abandoned."""
        before = self._last
        if position[2] >= before[2]:
            return
        joined = position[2] == 0 and before[1] == 0  # a collector beside a learner, which counts no steps
        if position[1] > before[1] or position[3] > before[3] or joined:
            self.several = True
            return
        self.went_back += 1
        for table in (*self.sections.values(), self.track):
            table.cut(position)
        self.highest = position

    def column(self, section: str, axis: str, name: str) -> tuple[Array, Array]:
        """As `Table.column`, in the order of the axis."""
        table = self.sections.get(section)
        if table is None:
            return np.zeros(0), np.zeros(0)
        x, y = table.column(axis, name)
        order = np.argsort(x, kind="stable")
        return x[order], y[order]

    def metric_names(self, section: str) -> list[str]:
        """The metrics of a section, in the order in which they were first written."""
        return self.sections[section].metric_names() if section in self.sections else []
