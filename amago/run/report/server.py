"""The web server of `amago watch`: one page, its sections as JSON, and plotly.js. It answers GET and HEAD, and opens no file."""

from __future__ import annotations

import hmac
import ipaddress
import json
import socket
import sys
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from amago.run.report.curves import AXES, STATISTICS
from amago.run.report.figures import EACH, Choice
from amago.run.report.page import body_of, live_page, plotly_script
from amago.run.report.sections import SECTIONS
from amago.run.report.watch import Watcher

_COOKIE = "amago-watch"
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data: blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class WatchServer(ThreadingHTTPServer):
    """Serves the page of a `Watcher`.

    Args:
        address: (host, port); port 0 takes a free one.
        watcher: started.
        token: that visitors must know; None: everybody may look, which is refused for addresses that other machines can reach.

    Raises:
        ImportError: Plotly is not installed; names the extra.
        ValueError: the address needs a token.
        OSError: the address cannot be used.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], watcher: Watcher, token: str | None = None):
        if not is_local(address[0]) and not token:
            raise ValueError(f"host {address[0]!r} can be reached by other machines, so the page needs a token")
        self.watcher, self.token = watcher, token
        self.script = plotly_script().encode()
        self.page = live_page("amago watch", watcher.seconds).encode()
        # names by which a browser may ask; another one means that a foreign site has itself resolved to this address
        self.names = {"localhost", "127.0.0.1", "::1", address[0]} if is_local(address[0]) else None
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        """The address for a browser, with the token."""
        host, port = self.server_address[:2]
        shown = socket.gethostname() if str(host) in ("0.0.0.0", "::") else f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{shown}:{port}/{f'?token={self.token}' if self.token else ''}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A visitor who leaves in the middle of an answer is no error of ours."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def is_local(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
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
        query = {k: v[-1] for k, v in parse_qs(url.query).items()}
        if not self._name_is_ours():
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", b"this page is not for other sites")
        if self.server.token is not None and not self._knows_token(query.get("token")):
            return self._send(
                HTTPStatus.UNAUTHORIZED, "text/plain", b"open the address that amago watch has printed, with its token"
            )
        if "token" in query and url.path == "/" and self.server.token is not None:  # keep it out of the browser's history
            return self._send(HTTPStatus.SEE_OTHER, "text/plain", b"", {"Location": "./", "Set-Cookie": self._cookie()})
        return self._answer(url.path, query)

    do_HEAD = do_GET

    def _answer(self, path: str, query: dict[str, str]) -> None:
        if path == "/":
            return self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
        if path == "/plotly.js":
            return self._send(
                HTTPStatus.OK, "text/javascript; charset=utf-8", self.server.script, {"Cache-Control": "max-age=86400"}
            )
        if path == "/state":
            return self._send_json(self.server.watcher.state())
        key = path.removeprefix("/section/")
        choice = Choice(query.get("axis", "env_steps"), query.get("statistic", "mean"))
        if path == key or key not in SECTIONS or choice.axis not in AXES or choice.statistic not in (*STATISTICS, EACH):
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is nothing here")
        section = self.server.watcher.section(key, choice)
        text, figures = body_of(section)
        return self._send_json({"title": section.title, "html": text, "figures": figures})

    def _name_is_ours(self) -> bool:
        if self.server.names is None:
            return True
        return (urlsplit(f"//{self.headers.get('Host', '')}").hostname or "") in self.server.names

    def _knows_token(self, given: str | None) -> bool:
        assert self.server.token is not None
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            cookies = SimpleCookie()
        kept = cookies[_COOKIE].value if _COOKIE in cookies else None
        token = self.server.token.encode()
        return any(hmac.compare_digest(one.encode(), token) for one in (given, kept) if one is not None)

    def _cookie(self) -> str:
        return f"{_COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"

    def _send_json(self, value: Any) -> None:
        self._send(HTTPStatus.OK, "application/json", json.dumps(value, allow_nan=False).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
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

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed: their addresses may hold the token."""
