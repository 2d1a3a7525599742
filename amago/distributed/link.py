"""The way from a node with collectors to the node of the learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from amago.distributed.ingest import Ingest

Beats = Mapping[str, Mapping[str, Any]]
"""What collectors say of themselves, by name (`amago.run.roles.protocol.Assignment.beat_file`)."""


@dataclass(frozen=True)
class Parcel:
    """A file on its way to the learner.

    Attributes:
        kind: "trajectories", for its store; "report", for its log; "state", the exploration schedules of the collector ``name``, which
            another node may go on with.
        name: of the file, unique in the run.
        path: of the file, on a node whose disk the learner's node shares. The file is moved.
        data: its content, from another node.
    """

    kind: Literal["trajectories", "report", "state"]
    name: str
    path: Path | None = None
    data: bytes | None = None


@dataclass(frozen=True)
class Answer:
    """What a node learns in return.

    Attributes:
        version: of the newest published policy.
        pause: collectors shall wait.
        stop: collectors shall end.
    """

    version: int = 0
    pause: bool = False
    stop: bool = False


class Link(Protocol):
    """The way from one node to the learner's. A call that failed, or whose answer was lost, may be repeated."""

    def put(self, parcels: Sequence[Parcel], beats: Beats) -> Answer:
        """Deliver files. Those that have an answer have arrived for good, each once.

        Raises:
            OSError: not all have arrived; deliver all of them again.
        """
        ...

    def weights(self) -> bytes | None:
        """The newest published policy, as the content of ``policy.pt``; None if the node reads the learner's file itself."""
        ...


class LocalLink:
    """A `Link` within one machine: files are moved, and weights are read where the learner writes them.

    Args:
        ingest: of the run.
        answer: what to tell collectors that have said this.
    """

    def __init__(self, ingest: Ingest, answer: Callable[[Beats], Answer]):
        self._ingest, self._answer = ingest, answer

    def put(self, parcels: Sequence[Parcel], beats: Beats) -> Answer:
        self._ingest.take([(p.name, p.path if p.data is None else p.data) for p in parcels if p.kind == "trajectories"])
        self._ingest.take_reports([(p.name, p.path if p.data is None else p.data) for p in parcels if p.kind == "report"])
        return self._answer(beats)

    def weights(self) -> None:
        return None
