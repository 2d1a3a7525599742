"""How far the policies of collectors are behind the newest published one."""

from __future__ import annotations

from amago.distributed.link import Beats
from amago.run.roles.protocol import OLD_POLICY

LAG_SAID = 10
"""Versions behind the newest policy from which a launch without ``--max-policy-lag`` says that a collector's policy is old."""


class OldPolicies:
    """Says once of each collector that its policy is old, or that it waits for a newer one.

    Args:
        bound: versions behind the newest, at most; None: there is no bound.
    """

    def __init__(self, bound: int | None = None):
        self.bound = bound
        self._said: set[str] = set()

    def news(self, newest: int, beats: Beats) -> list[str]:
        """What is to be said now.

        Args:
            newest: version of the newest published policy.
            beats: of collectors.
        """
        found = []
        for name, beat in beats.items():
            version = int(beat.get("version", 0))
            lag = newest - version
            if name in self._said or not version or lag <= (LAG_SAID if self.bound is None else self.bound):
                continue
            if self.bound is None:
                found.append(
                    f"{name} acts with policy {version}, {lag} versions older than the newest, {newest}: its phases of "
                    "train_timesteps_per_epoch steps are long beside the learner's epochs, or new weights do not reach it. Shorter phases "
                    "help; --max-policy-lag N ends phases and lets collectors wait (said once)"
                )
            elif beat.get("paused") == OLD_POLICY:
                found.append(
                    f"{name} waits for a newer policy than {version}, which is {lag} versions older than the newest, {newest}; "
                    f"--max-policy-lag allows {self.bound} (said once)"
                )
            else:
                continue
            self._said.add(name)
        return found
