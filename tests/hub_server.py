"""A stand-in for the Hugging Face Hub over HTTP on 127.0.0.1: repositories in memory, whose files are all small (none by LFS)."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "A1b2" * 8


class Hub(ThreadingHTTPServer):
    """Repositories by name: {file: bytes}; and what was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.requests: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def state(self, name: str) -> str:
        """The hash of the newest commit."""
        files = self.repositories[name]
        return hashlib.sha1(b"".join(k.encode() + files[k] for k in sorted(files))).hexdigest()


@contextmanager
def serving() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_GET

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path))
        body = self._body()
        for pattern, handle in _ROUTES.items():
            found = re.fullmatch(pattern, path)
            if found:
                handle(self, body, *found.groups())
                return
        self._json({"error": f"the stand-in knows no {path}"}, 404)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, content: bytes, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, value: Any, code: int = 200, **headers: str) -> None:
        self._send(json.dumps(value).encode(), code, Content_Type="application/json", **headers)

    def _may(self, name: str, write: bool = False) -> bool:
        """Answers 401 or 404 where a request is not allowed, as the Hub does."""
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if (write or name in self.server.private) and not known:
            self._json({"error": "Invalid credentials"}, 401)
        elif name not in self.server.repositories:
            self._json({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        else:
            return True
        return False

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = "/".join(filter(None, [asked.get("organization"), asked["name"]]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._json({"error": "Invalid credentials"}, 401)
            return
        there = name in self.server.repositories
        self.server.repositories.setdefault(name, {".gitattributes": b""})
        if asked.get("private") or asked.get("visibility") == "private":
            self.server.private.add(name)
        self._json({"url": f"{self.server.url}/{name}", "name": name, "id": name}, 409 if there else 200)

    def info(self, body: bytes, name: str, revision: str | None) -> None:
        if self._may(name):
            files = [{"rfilename": f} for f in self.server.repositories[name]]
            self._json(
                {"id": name, "modelId": name, "sha": self.server.state(name), "siblings": files, "tags": [], "private": False}
            )

    def tree(self, body: bytes, name: str) -> None:
        if self._may(name):
            files = self.server.repositories[name].items()
            self._json([{"type": "file", "path": f, "size": len(c), "oid": hashlib.sha1(c).hexdigest()} for f, c in files])

    def validate(self, body: bytes) -> None:
        self._json({"errors": [], "warnings": []})

    def preupload(self, body: bytes, name: str) -> None:
        if self._may(name, write=True):
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for f in json.loads(body)["files"]
            ]
            self._json({"files": modes})

    def commit(self, body: bytes, name: str) -> None:
        if not self._may(name, write=True):
            return
        files = self.server.repositories[name]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        oid = self.server.state(name)
        self._json({"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None})

    def resolve(self, body: bytes, name: str, revision: str, file: str) -> None:
        if not self._may(name):
            return
        content = self.server.repositories[name].get(file)
        if content is None:
            self._json({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
        else:
            self._send(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=self.server.state(name))


_NAME = r"([\w.-]+/[\w.-]+)"
_ROUTES: dict[str, Any] = {
    "/api/repos/create": _Handler.create,
    "/api/validate-yaml": _Handler.validate,
    f"/api/(?:models|datasets)/{_NAME}(?:/revision/(.+))?": _Handler.info,
    f"/api/(?:models|datasets)/{_NAME}/tree/.+": _Handler.tree,
    f"/api/(?:models|datasets)/{_NAME}/preupload/.+": _Handler.preupload,
    f"/api/(?:models|datasets)/{_NAME}/commit/.+": _Handler.commit,
    rf"/{_NAME}/resolve/([^/]+)/(.+)": _Handler.resolve,
}
