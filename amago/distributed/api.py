"""`launch`: a learner and its collectors, from Python."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def launch(
    program: str | os.PathLike[str],
    argv: Sequence[str] = (),
    *,
    collectors: int,
    learners: int = 1,
    updates_per_step: str | None = None,
    hang_timeout: float | None = None,
    ray: str | None = None,
    node_dir: str | None = None,
    quiet: bool = False,
    max_policy_lag: int | None = None,
    max_undelivered: float | None = None,
) -> int:
    """Run a program with one learner and several collectors, as ``amago launch`` does, and wait for its end.

    The launcher is a process of its own. If this process is killed, so are all that it has started.

    Args:
        program: a script that builds and starts an `amago.Experiment`; or "-m", with the module's name as the first of ``argv``.
        argv: the script's arguments.
        collectors: processes that act. Each has ``parallel_actors`` environments.
        learners: processes that train, on a GPU each.
        updates_per_step: "MIN:MAX", updates per environment step (`amago.run.roles.limits.UpdateLimits`); None: no limit.
        hang_timeout: seconds without a step after which a collector is replaced, and without an update after which the learner is started
            again; None: 180.
        ray: collectors run on the nodes of a Ray cluster, of which this machine is one: "auto", or "HOST:PORT"; None: on this machine.
        node_dir: with ``ray``, directory of each node for what is not delivered yet (``amago launch --node-dir``).
        quiet: show no progress.
        max_policy_lag: a collector whose policy is more versions than this older than the newest waits for a newer one; None: never.
        max_undelivered: gigabytes that may wait while they cannot be delivered, before collectors pause; None: 10.

    Returns:
        the exit code: that of the learner; 1 if collectors die, or the learner hangs, again and again; 2 after a mistake in the arguments.
    """
    options = {"max_policy_lag": max_policy_lag, "max_undelivered": max_undelivered, "ray": ray, "node_dir": node_dir}
    words = command(program, argv, collectors, learners, updates_per_step, hang_timeout, quiet, **options)  # type: ignore[arg-type]
    return subprocess.run(words, check=False).returncode


def command(
    program: str | os.PathLike[str],
    argv: Sequence[str],
    collectors: int,
    learners: int = 1,
    updates_per_step: str | None = None,
    hang_timeout: float | None = None,
    quiet: bool = False,
    *,
    max_policy_lag: int | None = None,
    max_undelivered: float | None = None,
    ray: str | None = None,
    node_dir: str | None = None,
) -> list[str]:
    """The command line that does what `launch` says."""
    words = [sys.executable, "-m", "amago.cli", "launch", "--collectors", str(collectors), "--learners", str(learners)]
    words += [] if updates_per_step is None else [f"--updates-per-step={updates_per_step}"]
    words += [] if hang_timeout is None else ["--hang-timeout", str(hang_timeout)]
    words += [] if max_policy_lag is None else ["--max-policy-lag", str(max_policy_lag)]
    words += [] if max_undelivered is None else ["--max-undelivered", str(max_undelivered)]
    words += [] if ray is None else ["--ray", ray]
    words += [] if node_dir is None else [f"--node-dir={node_dir}"]
    words += ["--quiet"] if quiet else []
    return [*words, os.fspath(program), *argv]
