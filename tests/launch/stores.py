"""Stores that a bus may be in, on this machine: a bucket (moto), and a directory over ssh (a server of its own)."""

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import uuid
from pathlib import Path

import pytest
from fault_helpers import wait_until

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def need(*modules):
    """Skip the test where a package is missing."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: make test-ray")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def bucket(monkeypatch):
    """The URL of a bucket's directory, and the port of its server."""
    need("s3fs", "moto.server", "flask_cors")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port := free_port(), verbose=False)
    server.start()
    variables = {
        "ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "ACCESS_KEY_ID": "a",
        "SECRET_ACCESS_KEY": "b",
        "DEFAULT_REGION": "us-east-1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    try:
        import s3fs

        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name := f"bucket-{uuid.uuid4().hex}")
        yield f"s3://{name}/run", port
    finally:
        server.stop()


class SecureShell:
    """An ssh server for this user alone. Its client's files are in ``home``.

    Args:
        addresses: of this machine, on which it listens.
        before: words before its command, such as ``ip netns exec NAME``.
    """

    def __init__(self, root, addresses=("127.0.0.1",), before=()):
        if not os.path.exists(SSHD):
            pytest.skip("sshd is not installed; Debian: apt-get install openssh-server")
        need("sshfs")
        self.root, self.home, self.port, self.addresses, self.before = root, root / "home", free_port(), addresses, before
        (self.home / ".ssh").mkdir(parents=True)
        for path in (root / "host", self.home / ".ssh" / "id_ed25519"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        kind, key, *_ = (root / "host.pub").read_text().split()
        (self.home / ".ssh" / "known_hosts").write_text("".join(f"[{a}]:{self.port} {kind} {key}\n" for a in addresses))
        shutil.copy(self.home / ".ssh" / "id_ed25519.pub", root / "keys")
        (root / "conf").write_text(
            "".join(f"ListenAddress {address}:{self.port}\n" for address in addresses)
            + f"HostKey {root}/host\nPidFile none\nAuthorizedKeysFile {root}/keys\n"
            "StrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\nSubsystem sftp internal-sftp\n"
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # the server's own, of the system
        self.start()

    def start(self):
        words = [*self.before, SSHD, "-D", "-E", str(log := self.root / "log"), "-f", str(self.root / "conf")]
        log.unlink(missing_ok=True)
        self.process = subprocess.Popen(words)
        wait_until(lambda: log.exists() and log.read_text().count("listening on") >= len(self.addresses))

    def end(self):
        self.process.terminate()
        self.process.wait(200)

    def url(self, address="127.0.0.1"):
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        return f"sftp://{user}@{address}:{self.port}{self.root}/bus"


@contextlib.contextmanager
def over_ssh(root, monkeypatch):
    server = SecureShell(root)
    monkeypatch.setenv("HOME", str(server.home))
    try:
        yield server
    finally:
        server.end()
