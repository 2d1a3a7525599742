"""Where the collectors of a launch run: on this machine, or (`amago.distributed.ray_cluster`) on the nodes of a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from amago.distributed.children import Child, Collectors, Patience
from amago.distributed.ingest import Ingest
from amago.distributed.link import Answer, Beats, LocalLink
from amago.distributed.mirror import MOST_WAITING_BYTES, Mirror
from amago.run.roles.protocol import REPORTS, Assignment, collector_dir, launch_dir

# one thread, and no GPU unless the user says otherwise: a collector's products are small, and there are many collectors
_ALONE = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "ACCELERATE_USE_CPU": "true"}


@dataclass(frozen=True)
class Task:
    """What each collector of a launch runs.

    Attributes:
        program: of the user, with its arguments, after the interpreter.
        least, most: updates per environment step.
        patience: of whoever watches the collectors.
        variables: of the environment, which the collectors get.
        max_policy_lag: versions by which the policy of a collector may be older than the newest; None: any number.
        max_undelivered: bytes that may wait on a machine while they cannot be delivered.
    """

    program: Sequence[str]
    least: float
    most: float | None
    patience: Patience
    variables: Mapping[str, str] = field(default_factory=lambda: {k: os.environ.get(k, v) for k, v in _ALONE.items()})
    max_policy_lag: int | None = None
    max_undelivered: float = MOST_WAITING_BYTES

    def collector(self, index: int, neighbours: int, control: Path) -> Child:
        """The process of a collector, not started.

        Args:
            index: of the collector.
            neighbours: collectors on its machine.
            control: directory of its small files.
        """
        assignment = Assignment("collector", index, neighbours, str(control), self.least, self.most, self.max_policy_lag)
        return Child(assignment, [sys.executable, *self.program], self.variables, control / f"{assignment.name}.log")


@dataclass(frozen=True)
class Work:
    """What the collectors of a launch are to do.

    Attributes:
        task: of each.
        collectors: how many there are, on all machines.
        learners: processes that train on this machine.
        control: directory of the small files through which the launcher talks to the learner.
        answer: what to tell collectors that have said this.
    """

    task: Task
    collectors: int
    learners: int
    control: Path
    answer: Callable[[Beats], Answer]


class Place(Protocol):
    """The collectors of a launch, wherever they run.

    Attributes:
        news: sentences for the user, until somebody takes them.
        replaced: processes that were replaced so far.
        beats: what each collector says of itself, by name; empty before its start.
        waiting: bytes that could not be delivered when that was last tried.
        run: how many run, or have ended with files that are still on their way.
    """

    news: list[str]

    @property
    def replaced(self) -> int: ...

    @property
    def beats(self) -> Beats: ...

    @property
    def waiting(self) -> int: ...

    @property
    def run(self) -> int: ...

    def meet_learner(self, hello: Mapping[str, Any]) -> None:
        """The learner has said where its run ("run_dir") and its store ("save_to") are, once."""

    def watch(self) -> None:
        """Start those that are due, and replace those that have died or hang.

        Raises:
            CollectorError: one dies again and again, soon after its start.
        """

    def deliver(self) -> Answer | None:
        """Move what they have written towards the learner's store; returns what they are told, None before `meet_learner`."""

    def tell(self, number: int) -> None:
        """Send a signal to those that run, with which they end."""

    def kill(self) -> None:
        """End all at once."""

    def close(self) -> None:
        """Release what is held."""


class ThisMachine(Collectors):
    """Collectors of this machine, which share the learner's disk (a `Place`).

    Args:
        work: of the collectors.
    """

    def __init__(self, work: Work):
        children = [work.task.collector(i, work.collectors, work.control) for i in range(work.collectors)]
        super().__init__(children, work.task.patience)
        self.work = work
        self.ingest: Ingest | None = None
        self.mirror: Mirror | None = None

    def meet_learner(self, hello: Mapping[str, Any]) -> None:
        run_dir = Path(hello["run_dir"])
        self.ingest = Ingest(hello["save_to"], launch_dir(run_dir) / REPORTS)
        # directories of collectors that an earlier launch had and this one has not still hold what they have collected
        found = {path for path in launch_dir(run_dir).glob("collector-*") if path.is_dir()}
        found |= {collector_dir(run_dir, i) for i in range(self.work.collectors)}
        self.mirror = Mirror(
            LocalLink(self.ingest, self.work.answer), sorted(found), most_waiting=self.work.task.max_undelivered
        )

    @property
    def waiting(self) -> int:
        return 0 if self.mirror is None else self.mirror.waiting

    def deliver(self) -> Answer | None:
        for child in self.children:
            child.listen()
        return None if self.mirror is None else self.mirror.pump(self.beats)

    def close(self) -> None:
        self.kill()
        if self.ingest is not None:
            self.ingest.close()
