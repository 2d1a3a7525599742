"""Beyond one process: `launch` starts a learner and its collectors, moves their data, and replaces those that fail; Ray may start the
collectors, whose files go by a bus."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

from amago.registry import require

__all__ = ["launch"]

# as "python -m amago.cli", which would look for a folder "amago" in the current directory first
_MAIN = "import sys; sys.path[:] = [p for p in sys.path if p]; from amago.cli import main; sys.exit(main())"
AMAGO = (sys.executable, "-c", _MAIN)
_LEAST_RAY = (2, 52)  # the first version with tokens


def launch(
    program: str | os.PathLike[str], argv: Sequence[str] = (), *, collectors: int, learners: int = 1, updates_per_step: str | None = None,
    hang_timeout: float | None = None, bus: str | None = None, ray: str | None = None, quiet: bool = False,
    max_policy_lag: int | None = None, max_undelivered: float | None = None,
) -> int:  # fmt: skip
    """Run a program with one learner and several collectors, as ``amago launch`` does, and wait for its end.

    The launcher is a separate process.

    Args:
        program: a script that builds and starts an `amago.Experiment`; or "-m", with the module's name as the first of ``argv``.
        argv: the script's arguments.
        collectors: processes that act. Each has ``parallel_actors`` environments.
        learners: processes that train, on a GPU each.
        updates_per_step: "MIN:MAX" (`amago.run.launched.protocol.UpdateLimits`); None: from half to twice the program's own ratio.
        hang_timeout, max_policy_lag, max_undelivered, bus, ray, quiet: as the options of ``amago launch --help``; None: its default.

    Returns:
        the exit code: the learner's; 1 if a process dies or hangs again and again; 2 after a mistake in the arguments.
    """
    words = command(
        program, argv, collectors, quiet=quiet, learners=learners, updates_per_step=updates_per_step, hang_timeout=hang_timeout, bus=bus, ray=ray,
        max_policy_lag=max_policy_lag, max_undelivered=max_undelivered,
    )  # fmt: skip
    return subprocess.run(words, check=False).returncode


def command(
    program: str | os.PathLike[str], argv: Sequence[str], collectors: int, *, quiet: bool = False, **options: str | float | None
) -> list[str]:
    """The command line of `launch`, with its options."""
    words = [*AMAGO, "launch", "--collectors", str(collectors), *(["--quiet"] if quiet else [])]
    words += [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
    return [*words, os.fspath(program), *argv]


@contextlib.contextmanager
def collectors_on_ray(address: str, words: Sequence[str], collectors: int) -> Iterator[None]:
    """Let Ray start ``amago collect`` with these words on the nodes of a cluster, and again elsewhere when it ends or a node dies. Each
    collector takes a core; up to four share a process, as many as the smallest node has cores. They end with the block."""
    ray = require("ray", "ray", "--ray")
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < _LEAST_RAY:
        raise ValueError(f"Ray {ray.__version__} has no tokens: who reaches its ports runs code as you; install 2.52 or later")
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise ValueError(
            "Ray runs the code of whoever reaches its ports unless it asks for a token: set RAY_AUTH_MODE=token and a token (RAY_AUTH_TOKEN or "
            "~/.ray/auth_token) on each node before `ray start`, and here"
        )
    ray.init(address=address, log_to_driver=False)
    directory, cores = os.getcwd(), [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    if collectors > sum(cores):
        print(f"Ray has {sum(cores)} cores for {collectors} collectors: the others begin when it has more", file=sys.stderr)

    def collect(count: int) -> None:
        subprocess.run([*AMAGO, "collect", "--collectors", str(count), *words], cwd=directory, check=True)

    task = ray.remote(max_retries=-1, retry_exceptions=True, scheduling_strategy="SPREAD")(collect)
    share = min([4, *filter(None, cores)])
    counts = [min(share, collectors - first) for first in range(0, collectors, share)]
    started = [task.options(num_cpus=count).remote(count) for count in counts]
    try:
        yield
    finally:
        for one in started:
            ray.cancel(one, force=True)
        ray.shutdown()
