"""The HTML page about runs: `amago report` writes it into one file, and `amago watch` serves it, written again after a change."""

from __future__ import annotations

import hmac
import html
import json
import socket
import sys
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import parse_qs, urlsplit

from amago.registry import require
from amago.report.curves import AXES, EACH, STATISTICS
from amago.report.runs import find_runs, group_runs, name_runs, read_run, status_of, walk
from amago.report.sections import SECTIONS, Content, Figure, Section, all_figures, draw

RELOAD_SECONDS = 10
"""Between two looks of a live page at the server."""


def write_report(paths: Sequence[str | Path], out: str | Path, statistic: str = "mean") -> Path:
    """Write a page about the runs at and below some directories into the file ``out``, and return it.

    ``statistic``, over seeds, is a key of `amago.report.curves.STATISTICS`, or "each run". A directory without runs is a
    ValueError; without Plotly, an ImportError names the extra.
    """
    find_runs(paths)
    out = Path(out)
    text = render(paths, statistic)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    return out


def render(paths: Sequence[str | Path], statistic: str = "mean", live: bool = False) -> str:
    """The page about the runs at and below some directories.

    ``live``, for `amago watch`: there may be no run yet, and the page reloads itself, and plotly.js from the server.
    """
    runs, unreadable = [], []
    for path in dict.fromkeys(found for root in paths for found in walk(Path(root))):
        try:
            runs.append(read_run(path))
        except OSError as err:  # deleted or renamed in this moment, or not readable
            unreadable.append(f"{path}: {err.strerror or err}")
    name_runs(runs)
    content = Content(group_runs(runs), unreadable)
    figures: list[Figure] = []
    plots = all_figures(content)
    body = ""
    for key, (head, fill) in SECTIONS.items():
        section = Section(figures)
        if fill is not None:
            fill(content, section)
        draw(content, section, [plot for plot in plots if plot.section == key])
        missing = "".join(f'<p class="missing">Left out: {html.escape(reason)}.</p>' for reason in section.missing)
        body += f'<section id="{key}"><h2>{head}</h2><div class="content">{section.text}{missing}</div></section>'
    states = [status_of(run).state for run in runs]
    running = f"{states.count('running')} of {len(runs)} runs running"
    title = running if live else runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    data = {
        "figures": figures, "axes": AXES, "statistics": [*STATISTICS, EACH], "axis": "env_steps", "statistic": statistic,
        "reload": RELOAD_SECONDS if live else 0,
    }  # fmt: skip
    template = Template(resources.files("amago.report").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        TITLE=html.escape(title), WRITTEN=f"written {datetime.now().astimezone():%Y-%m-%d %H:%M:%S}", BODY=body,
        DATA=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        PLOTLY='<script src="plotly.js"></script>' if live else f"<script>{plotly_script()}</script>",
    )  # fmt: skip


def plotly_script() -> str:
    """The source of plotly.js, from the Python package; ImportError names the extra."""
    script: str = require("plotly.offline", "report", "a page about runs").get_plotlyjs()
    return script


_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data: blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
"""Addresses that can be reached from this machine alone."""


class WatchServer(ThreadingHTTPServer):
    """Serves a page about the runs at and below some directories, and plotly.js.

    Args:
        address: (host, port); port 0 takes a free one.
        roots: the directories. Runs may appear, grow, be killed, resumed, renamed or deleted meanwhile. Nothing is written.
        token: that visitors must know; None: everybody may look, which is refused for addresses that other machines can reach.
    """

    def __init__(self, address: tuple[str, int], roots: Sequence[Path], token: str | None = None):
        if address[0] not in LOCAL and not token:
            raise ValueError(f"host {address[0]!r} can be reached by other machines, so the page needs a token")
        self.roots, self.token = roots, token
        self.script = plotly_script().encode()
        # host names that a browser may send; another one means that a foreign site has itself resolved to this address
        self.names = LOCAL if address[0] in LOCAL else None
        self._lock, self._page, self.due = threading.Lock(), "", 0.0
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        """The address for a browser, with the token."""
        host, port = str(self.server_address[0]), self.server_address[1]
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}/{f'?token={self.token}' if self.token else ''}"

    def page(self) -> str:
        """The page about the present files. Rewriting it takes at most a tenth of the time."""
        with self._lock:
            now = time.monotonic()
            if now >= self.due:
                self._page = render(self.roots, live=True)
                self.due = time.monotonic() + 9 * (time.monotonic() - now)
            return self._page

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors, except the closed connection of a visitor who leaves in the middle of an answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    timeout = 30

    def do_GET(self) -> None:
        """Answer a request."""
        url, server = urlsplit(self.path), self.server
        token = parse_qs(url.query).get("token", [""])[-1]
        if server.names is not None and urlsplit(f"//{self.headers.get('Host', '')}").hostname not in server.names:
            self._send(HTTPStatus.FORBIDDEN, b"this page is not for other sites")
        elif url.path == "/plotly.js":  # a public program: the page's link to it has no token
            self._send(HTTPStatus.OK, server.script, "text/javascript; charset=utf-8", "max-age=86400")
        elif server.token and not hmac.compare_digest(token.encode(), server.token.encode()):
            self._send(HTTPStatus.UNAUTHORIZED, b"open the address that amago watch has printed, with its token")
        elif url.path == "/":
            self._send(HTTPStatus.OK, server.page().encode(), "text/html; charset=utf-8")
        else:
            self._send(HTTPStatus.NOT_FOUND, b"there is nothing here")

    do_HEAD = do_GET

    def _send(self, status: HTTPStatus, body: bytes, kind: str = "text/plain", cache: str = "no-store") -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", cache), ("Content-Security-Policy", _POLICY),
            ("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer"),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print no requests: their addresses may hold the token."""
