"""A local Pokemon Showdown server that ends with the process that started it."""

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
_CHECKOUT = Path(__file__).parents[2] / "tools" / "showdown"


class BattleError(RuntimeError):
    """A battle failed: the server has ended, rejected a request, or sent an invalid message."""


def find_showdown(package: str | Path | None = None) -> Path:
    """The folder of the npm package pokemon-showdown.

    It is ``package`` if given, else the value of the environment variable AMAGO_SHOWDOWN if set, else in ``node_modules`` of
    the working directory or of ``tools/showdown`` in a checkout of this library, where ``make showdown`` installs it.

    Raises:
        ImportError: the package is not there; the message names the command that installs it.
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
        f"`{_NPM}` in the working directory; or set the environment variable {VARIABLE} to its folder"
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
    """A Showdown server that listens on a free port of 127.0.0.1 and writes no files.

    Use it as a context manager, or call `close`. The server also ends when this process ends for any reason, because its
    standard input is a pipe from this process.

    Args:
        package: folder of the npm package; see `find_showdown`.
        timeout: maximum seconds until the server is ready.

    Attributes:
        port: the server's port.
        url: the server's url, an argument of `PokemonBattle`.
        pid: process id of the server.

    Raises:
        ImportError: Node.js or the package is missing; the message names the command that installs it.
        RuntimeError, TimeoutError: the server did not start; the message ends with its output.
    """

    def __init__(self, package: str | Path | None = None, timeout: float = 60.0) -> None:
        command = [_find_node(), str(_LAUNCHER), str(find_showdown(package))]
        self._log: IO[bytes] = tempfile.TemporaryFile()
        # in a separate session, so that Ctrl-C does not end the server before the learner has finished its epoch
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
                    f"the Showdown server ended while it started, with exit code {self._process.returncode}:\n{text}"
                )
            if port and re.search(r"^amago: ready$", text, flags=re.MULTILINE):
                return int(port[1])
            if time.monotonic() > end:
                raise TimeoutError(f"the Showdown server has not started within {timeout} s:\n{text}")
            time.sleep(0.02)

    def output(self, most: int = 20_000) -> str:
        """The last ``most`` bytes of the server's output."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), most, max(0, size - most)).decode(errors="replace")

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Stop the server and wait for its end. A second call has no effect."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:  # a fork of this process still holds the pipe
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> ShowdownServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
