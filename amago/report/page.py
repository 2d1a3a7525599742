"""The HTML page about runs: `amago report` writes it into one file, and `amago watch` serves it, written again after a change."""

from __future__ import annotations

import hmac
import html
import ipaddress
import json
import socket
import sys
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from amago.registry import require
from amago.report.curves import AXES, EACH, STATISTICS
from amago.report.runs import find_runs, group_runs, name_runs, read_run, status_of, walk
from amago.report.sections import SECTIONS, Content, Figure, Plot, all_figures, fill

RELOAD_SECONDS = 10
"""Between two looks of a live page at the server."""


def write_report(paths: Sequence[str | Path], out: str | Path, statistic: str = "mean") -> Path:
    """Write a page about the runs at and below some directories into the file ``out``, and return it.

    ``statistic``, over seeds, is a key of `amago.report.curves.STATISTICS`, or "each run". A directory without runs is a
    FileNotFoundError; without Plotly, an ImportError names the extra.
    """
    if statistic not in (*STATISTICS, EACH):
        raise ValueError(f"statistic={statistic!r} is unknown: use one of {', '.join((*STATISTICS, EACH))}")
    find_runs(paths)
    text = render(paths, statistic)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.part")
    part.write_text(text, encoding="utf-8")
    return part.replace(out)


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
    content = Content(group_runs(runs), live, unreadable)
    figures: dict[str, list[Figure]] = {}
    plots = all_figures(content)
    body = "".join(_html_of(key, content, plots, figures.setdefault(key, [])) for key in SECTIONS)
    states = [status_of(run).state for run in runs]
    running = f"{states.count('running')} of {len(runs)} runs running"
    title = running if live else runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    data = {
        "figures": figures, "axes": AXES, "statistics": [*STATISTICS, EACH], "axis": "env_steps", "statistic": statistic,
        "reload": RELOAD_SECONDS if live else 0,
    }  # fmt: skip
    filled = {
        "TITLE": html.escape(title), "WRITTEN": f"written {datetime.now().astimezone():%Y-%m-%d %H:%M:%S}",
        "BODY": body, "DATA": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        "PLOTLY": '<script src="plotly.js"></script>' if live else f"<script>{plotly_script()}</script>",
    }  # fmt: skip
    parts = resources.files("amago.report").joinpath("page.html").read_text(encoding="utf-8").split("<!--")
    # inserted text may hold the mark of another place, so nothing is replaced twice
    return parts[0] + "".join(filled[mark] + rest for mark, rest in (part.split("-->", 1) for part in parts[1:]))


def plotly_script() -> str:
    """The source of plotly.js, from the Python package; ImportError names the extra."""
    script: str = require("plotly.offline", "report", "a page about runs").get_plotlyjs()
    return script


def _html_of(key: str, content: Content, plots: Sequence[Plot], figures: list[Figure]) -> str:
    """The HTML of a section; its figures, to be drawn into it in order, are added to the list."""
    section, parts = fill(key, content, plots), []
    for item in section.parts:
        if isinstance(item, str):
            parts.append(item)
        else:
            parts.append(f'<div class="figure" data-section="{key}" data-index="{len(figures)}"></div>')
            figures.append(item)
    parts += [f'<p class="missing">Left out: {html.escape(reason)}.</p>' for reason in section.missing]
    return f'<section id="{key}"><h2>{SECTIONS[key][0]}</h2><div class="content">{"".join(parts)}</div></section>'


_COOKIE = "amago-watch"
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data: blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class WatchServer(ThreadingHTTPServer):
    """Serves a page about the runs at and below some directories, and plotly.js.

    Args:
        address: (host, port); port 0 takes a free one.
        roots: the directories. Runs may appear, grow, be killed, resumed, renamed or deleted meanwhile. Nothing is written.
        token: that visitors must know; None: everybody may look, which is refused for addresses that other machines can reach.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], roots: Sequence[Path], token: str | None = None):
        if not is_local(address[0]) and not token:
            raise ValueError(f"host {address[0]!r} can be reached by other machines, so the page needs a token")
        self.roots, self.token = roots, token
        self.script = plotly_script().encode()
        # host names that a browser may send; another one means that a foreign site has itself resolved to this address
        self.names = {"localhost", "127.0.0.1", "::1", address[0]} if is_local(address[0]) else None
        self._lock, self._page, self.due = threading.Lock(), "", 0.0
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        """The address for a browser, with the token."""
        host, port = self.server_address[:2]
        shown = socket.gethostname() if str(host) in ("0.0.0.0", "::") else f"[{host!s}]" if ":" in str(host) else str(host)
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


def is_local(host: str) -> bool:
    """Test whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    timeout = 30
    server_version = "amago"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a request."""
        url = urlsplit(self.path)
        given = parse_qs(url.query).get("token", [None])[-1]
        names = self.server.names
        if names is not None and (urlsplit(f"//{self.headers.get('Host', '')}").hostname or "") not in names:
            return self._send(HTTPStatus.FORBIDDEN, b"this page is not for other sites")
        if self.server.token is not None and not self._knows_token(given):
            return self._send(HTTPStatus.UNAUTHORIZED, b"open the address that amago watch has printed, with its token")
        if given is not None and url.path == "/" and self.server.token is not None:  # keep it out of the browser's history
            cookie = f"{_COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            return self._send(HTTPStatus.SEE_OTHER, b"", headers={"Location": "./", "Set-Cookie": cookie})
        if url.path == "/":
            return self._send(HTTPStatus.OK, self.server.page().encode(), "text/html; charset=utf-8")
        if url.path == "/plotly.js":
            kind = "text/javascript; charset=utf-8"
            return self._send(HTTPStatus.OK, self.server.script, kind, {"Cache-Control": "max-age=86400"})
        return self._send(HTTPStatus.NOT_FOUND, b"there is nothing here")

    do_HEAD = do_GET

    def _knows_token(self, given: str | None) -> bool:
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            cookies = SimpleCookie()
        kept = cookies[_COOKIE].value if _COOKIE in cookies else None
        token = (self.server.token or "").encode()
        return any(hmac.compare_digest(one.encode(), token) for one in (given, kept) if one is not None)

    def _send(self, status: HTTPStatus, body: bytes, kind: str = "text/plain", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        fixed = {
            "Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store", "Content-Security-Policy": _POLICY,
            "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
        }  # fmt: skip
        for name, value in {**fixed, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print no requests: their addresses may hold the token."""
