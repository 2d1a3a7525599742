"""A Pokemon Showdown server of one's own, on this machine only, that ends with the process that started it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import warnings
from pathlib import Path
from types import TracebackType
from typing import IO

PACKAGE, VERSION = "pokemon-showdown", "0.11.11"
VARIABLE = "AMAGO_SHOWDOWN"
_NPM = f"npm install --omit=optional --ignore-scripts {PACKAGE}@{VERSION}"
_LAUNCHER = Path(__file__).with_suffix(".js")
_CHECKOUT = Path(__file__).parents[3] / "tools" / "showdown"


class BattleError(RuntimeError):
    """The battle cannot go on: the server is gone, refuses, or sent what could not be understood."""


def find_showdown(package: str | Path | None = None) -> Path:
    """The folder of the npm package pokemon-showdown.

    Looked for in ``package`` if it is given, else where the variable AMAGO_SHOWDOWN points to, else in ``node_modules`` of the
    working directory and of ``tools/showdown`` in a checkout of this library, where ``make showdown`` installs it.

    Raises:
        ImportError: it is not there; the message says how to install it.
    """
    named = package if package is not None else os.environ.get(VARIABLE)
    if named is not None:
        places = [Path(named)]
    else:
        places = [folder / "node_modules" / PACKAGE for folder in (Path.cwd(), _CHECKOUT)]
    for place in places:
        if (place / "dist" / "server" / "index.js").is_file():
            _warn_of_version(place)
            return place.resolve()
    raise ImportError(
        f"{PACKAGE} is not in {' or '.join(str(p) for p in places)}. Install it: `make showdown` in a checkout of amago, or "
        f"`{_NPM}` in the working directory; or let {VARIABLE} name its folder"
    )


def _warn_of_version(place: Path) -> None:
    found = "unknown"
    with contextlib.suppress(OSError, ValueError):
        found = str(json.loads((place / "package.json").read_text(encoding="utf-8")).get("version", found))
    if found != VERSION:
        warnings.warn(f"{place} is version {found} of {PACKAGE}; amago was tested with {VERSION}", RuntimeWarning, stacklevel=3)


def _find_node() -> str:
    node = shutil.which("node") or shutil.which("nodejs")
    if node is None:
        raise ImportError(f"{PACKAGE} needs Node.js 20 or later, and there is no `node`. Debian: apt-get install nodejs npm")
    return node


class ShowdownServer:
    """A Showdown server that listens on 127.0.0.1 alone, on a port that the system chooses, and writes no files.

    Use it as a context manager, or call `close`. Its standard input is a pipe that this process holds: when this process ends,
    however that comes about, the server ends too. Stopping it stops the battles on it.

    Args:
        package: folder of the npm package; see `find_showdown`.
        timeout: seconds that it may take to start.

    Attributes:
        port: where it listens.
        url: what a `PokemonBattle` is given.
        pid: of its only process.

    Raises:
        ImportError: Node.js or the package is missing; the message says how to install it.
        RuntimeError, TimeoutError: it did not start; the message ends with what it printed.
    """

    def __init__(self, package: str | Path | None = None, timeout: float = 60.0) -> None:
        command = [_find_node(), str(_LAUNCHER), str(find_showdown(package))]
        self._log: IO[bytes] = tempfile.TemporaryFile()
        # a session of its own: Ctrl-C in a terminal asks the learner to stop, which then goes on to use the server for a while
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.pid = self._process.pid
        try:
            self.port = self._wait(timeout)
        except BaseException:
            self.close()
            raise
        self.url = f"ws://127.0.0.1:{self.port}/showdown/websocket"

    def _wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while True:
            over, text = self._process.poll() is not None, self.output()
            port = re.search(r"^amago: port (\d+)$", text, flags=re.MULTILINE)
            if over:
                raise RuntimeError(
                    f"the Showdown server ended as it started, with exit code {self._process.returncode}:\n{text}"
                )
            if port and re.search(r"^amago: ready$", text, flags=re.MULTILINE):
                return int(port[1])
            if time.monotonic() > end:
                raise TimeoutError(f"the Showdown server has not started within {timeout} s:\n{text}")
            time.sleep(0.02)

    def output(self, most: int = 20_000) -> str:
        """The last of what the server printed."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), most, max(0, size - most)).decode(errors="replace")

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Stop the server and wait until it is gone. Calling it again does nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:  # a fork of this process holds the pipe as well
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> ShowdownServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
