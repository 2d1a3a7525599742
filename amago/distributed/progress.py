"""The progress line of a launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amago.run.roles.limits import UpdateLimits
from amago.run.roles.protocol import NO_SPACE, OLD_POLICY, PAUSED

_DOING = ("collecting", PAUSED, OLD_POLICY, NO_SPACE, "starting")


@dataclass
class Rates:
    """Speeds of two counters, over the last seconds.

    Args:
        window: seconds.
    """

    window: float = 20.0

    def __post_init__(self) -> None:
        self._marks: list[tuple[float, int, int]] = []

    def add(self, now: float, updates: int, steps: int) -> tuple[float, float]:
        """Updates and steps a second, after the counters have been read at this time."""
        marks = self._marks
        if marks and (updates < marks[-1][1] or steps < marks[-1][2]):  # the learner has gone back to a training state
            marks.clear()
        marks.append((now, updates, steps))
        while len(marks) > 2 and marks[1][0] <= now - self.window:
            marks.pop(0)
        first, seconds = marks[0], now - marks[0][0]
        return (0.0, 0.0) if seconds <= 0 else ((updates - first[1]) / seconds, (steps - first[2]) / seconds)


def progress_line(
    learner: Mapping[str, Any],
    collectors: Sequence[Mapping[str, Any]],
    speeds: tuple[float, float],
    limits: UpdateLimits,
    replaced: int = 0,
    newest: int = 0,
    waiting: int = 0,
) -> str:
    """What each role does, how fast, the ratio of updates to steps, and the lag of the weights.

    Args:
        learner: what the learner says of itself.
        collectors: what each collector says of itself; empty before its start.
        speeds: updates and steps a second.
        limits: of the ratio.
        replaced: processes so far.
        newest: version of the newest policy that is known; at least that of ``learner``.
        waiting: bytes that cannot be delivered.
    """
    if not learner:
        return "learner starting"
    updates, steps, version = int(learner["updates"]), int(learner["steps"]), max(newest, int(learner["version"]))
    doing = [_doing(beat) for beat in collectors]
    counts = ", ".join(f"{doing.count(what)} {what}" for what in _DOING if what in doing) or "none"
    lags = [version - int(beat["version"]) for beat in collectors if beat.get("version")]
    parts = [
        f"learner {learner['state']}, epoch {learner['epoch']}/{learner['epochs']}, {updates:,} updates ({speeds[0]:.1f}/s)",
        f"collectors: {counts}" + (f", {replaced} replaced" if replaced else "") + f"; {steps:,} steps ({speeds[1]:,.0f}/s)",
    ]
    if steps:
        within = "" if str(limits) == "unlimited" else f" in {limits}"
        parts.append(f"{updates / steps:.4g} updates/step{within}")
    parts.append(f"policy {version}" + (f", lag {max(lags)}" if lags else ""))
    if waiting:
        parts.append(f"{waiting / 1e6:,.0f} MB not delivered")
    return " | ".join(parts)


def _doing(beat: Mapping[str, Any]) -> str:
    if beat.get("paused"):
        return str(beat["paused"])
    return "collecting" if beat.get("state") == "collecting" else "starting"
