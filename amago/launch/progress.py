"""The progress line of a launch, and its reports of old policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from amago.run.launched.protocol import NO_SPACE, OLD_POLICY, PAUSED

_DOING = ("collecting", PAUSED, OLD_POLICY, NO_SPACE, "starting")
LARGE_LAG = 10
"""Versions behind the newest policy from which a launch without ``--max-policy-lag`` reports a collector's policy as old."""


class Rates:
    """Speeds of two counters, over the last seconds."""

    def __init__(self, window: float = 20.0):
        self.window = window
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
    replaced: int = 0,
    newest: int = 0,
    waiting: int = 0,
) -> str:
    """One line: the state of each role, its speed, the ratio of updates to steps, and the lag of the weights.

    Args:
        learner, collectors: the newest sign of life of each; empty before its start.
        speeds: updates and steps a second.
        newest: version of the newest policy; the learner's sign of life may be older.
        waiting: bytes that cannot be delivered.
    """
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
        f"{waiting / 1e6:,.0f} MB not delivered" if waiting else "",
    ]
    return " | ".join(filter(None, parts))


def old_policies(newest: int, beats: Mapping[str, Mapping[str, Any]], reported: set[str]) -> list[str]:
    """Sentences for the user about collectors that act with a policy far older than the newest; each collector is added to ``reported``."""
    found = []
    for name, beat in beats.items():
        version = int(beat.get("version", 0))
        if name not in reported and version and newest - version > LARGE_LAG:
            reported.add(name)
            found.append(
                f"{name} acts with policy {version}, {newest - version} versions older than the newest, {newest}: its phases of "
                "train_timesteps_per_epoch steps are long beside the learner's epochs, or new weights do not reach it. Shorter phases help; "
                "--max-policy-lag N ends phases and lets collectors wait (reported once)"
            )
    return found
