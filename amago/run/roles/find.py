"""The role of this process."""

from __future__ import annotations

from amago.run.roles.collector import Collector
from amago.run.roles.launched_learner import LaunchedLearner
from amago.run.roles.protocol import Assignment
from amago.run.roles.role import Role

_taken: list[str] = []


def find_role() -> Role:
    """The role that a launcher has given to this process, or that of a process without launcher.

    Raises:
        RuntimeError: another experiment of this process has the role.
    """
    assignment = Assignment.of_this_process()
    if assignment is None:
        return Role()
    if _taken:
        raise RuntimeError(
            f"a launched program starts one Experiment, and this one ({assignment.name}) starts a second: launch a program for each run "
            "(with --collectors, --trials must be 1)"
        )
    _taken.append(assignment.name)
    return Collector(assignment) if assignment.kind == "collector" else LaunchedLearner(assignment)
