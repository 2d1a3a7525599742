"""Start two ranks of a program of `rank_programs` under torchrun, and wait for what they do."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tiny
from fault_helpers import assert_gone

PROGRAM = Path(__file__).with_name("rank_programs.py")
PATIENCE = 600.0
"""Seconds after which a test gives up, on the slowest machine."""


class Launched:
    """A launcher and its two ranks, on a free port.

    Args:
        program: name of a function of `rank_programs`.
        directory: of its run; the output goes to a file there.
    """

    def __init__(self, program: str, directory: Path):
        self.directory, self.output = directory, directory / "output"
        for rank in (0, 1):
            (directory / f"pid-{rank}").unlink(missing_ok=True)
            (directory / f"code-{rank}").unlink(missing_ok=True)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAM), program,
        ]  # fmt: skip
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                [*command, str(directory)], env=tiny.environment(), stdout=output, stderr=output, start_new_session=True
            )

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks, in their order."""
        return [int((self.directory / f"pid-{rank}").read_text()) for rank in (0, 1)]

    @property
    def codes(self) -> list[str]:
        """The exit codes with which the ranks' runs have stopped, "" where one did not."""
        paths = [self.directory / f"code-{rank}" for rank in (0, 1)]
        return [path.read_text() if path.is_file() else "" for path in paths]

    def wait_for(self, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Wait until something is so, and fail if the launcher ends before."""
        limit = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < limit, self.output.read_text()
            time.sleep(0.1)

    def ended(self) -> float:
        """Wait until the launcher and all ranks have ended; how many seconds that took.

        Raises:
            TimeoutExpired, AssertionError: it takes too long.
        """
        began, pids = time.monotonic(), self.pids
        self.process.wait(PATIENCE)
        assert_gone(pids, PATIENCE)
        return time.monotonic() - began

    def close(self) -> None:
        """End everything, whatever happened."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)  # the launcher kills ranks that do not end
            except subprocess.TimeoutExpired:
                os.kill(self.process.pid, signal.SIGKILL)
                self.process.wait()


def finish(program: str, directory: Path) -> None:
    """Run two ranks of a program to their end, which must be a success."""
    launched = Launched(program, directory)
    try:
        code = launched.process.wait(PATIENCE)
    finally:
        launched.close()
    assert code == 0, launched.output.read_text()
