"""The progress line of a launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from amago.run.launched.protocol import NO_SPACE, OLD_POLICY, PAUSED

_DOING = ("collecting", PAUSED, OLD_POLICY, NO_SPACE, "starting")


class Rates:
    """Speeds of counters, over the last seconds."""

    def __init__(self, window: float = 20.0):
        self.window = window
        self._marks: list[tuple[float, tuple[int, ...]]] = []

    def add(self, now: float, *counts: int) -> tuple[float, ...]:
        """The counters' growth a second, after they have been read at this time."""
        if self._marks and any(
            a < b for a, b in zip(counts, self._marks[-1][1])
        ):  # the learner has gone back to a training state
            self._marks.clear()
        self._marks = [mark for mark in self._marks if mark[0] >= now - self.window][-100:] + [(now, counts)]
        began, before = self._marks[0]
        return tuple((a - b) / (now - began) if now > began else 0.0 for a, b in zip(counts, before))


def progress_line(
    learner: Mapping[str, Any], collectors: Sequence[Mapping[str, Any]], speeds: Sequence[float], replaced: int = 0,
    newest: int = 0, waiting: int = 0,
) -> str:  # fmt: skip
    """One line: the state of each role, by its newest sign of life (empty before its start), its speed a second, the ratio of updates to
    steps, and the lag of the weights behind the ``newest``."""
    if not learner:
        return "learner starting"
    updates, steps, version = int(learner["updates"]), int(learner["steps"]), max(newest, int(learner["version"]))
    doing = [beat.get("paused") or beat.get("state", "starting") for beat in collectors]
    counts = ", ".join(f"{doing.count(what)} {what}" for what in _DOING if what in doing) or "none"
    lags = [version - int(beat["version"]) for beat in collectors if beat.get("version")]
    limits = learner.get("limits", "unlimited")
    parts = [
        f"learner {learner['state']}, epoch {learner['epoch']}/{learner['epochs']}, {updates:,} updates ({speeds[0]:.1f}/s)",
        f"collectors: {counts}" + (f", {replaced} replaced" if replaced else "") + f"; {steps:,} steps ({speeds[1]:,.0f}/s)",
        f"{updates / steps:.4g} updates/step" + ("" if limits == "unlimited" else f" in {limits}") if steps else "",
        f"policy {version}" + (f", lag {max(lags)}" if lags else ""),
        f"{waiting / 1e6:,.0f} MB not delivered" if waiting >= 1e6 else "",
    ]
    return " | ".join(filter(None, parts))
