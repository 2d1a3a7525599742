"""Files of collectors on their way to the store: bundled, numbered, each taken once, over directories and over a store of objects."""

import json
import os
import signal
import subprocess
import sys
import uuid
import zipfile

import launching
import pytest
import stores

from amago.launch.bundles import Ingest, Spool
from amago.launch.bus import Bus
from amago.run.launched.protocol import OUTBOX, SPOOL


@pytest.fixture(params=["directory", "memory", "s3", "sftp"])
def bus(request, tmp_path, monkeypatch):
    if request.param == "s3":
        with stores.bucket(monkeypatch) as (url, _):
            yield Bus(url)
    elif request.param == "sftp":
        (tmp_path / "ssh").mkdir()
        with stores.over_ssh(tmp_path / "ssh", monkeypatch) as server:
            yield Bus(server.url())
    else:
        yield Bus(str(tmp_path / "bus") if request.param == "directory" else f"memory://{uuid.uuid4().hex}")


class Node:
    """A machine with one collector."""

    def __init__(self, root, bus, name="node"):
        self.home, self.bus, self.starts = root / name, bus, 0
        self.home.mkdir(mode=0o700)
        self.collector = self.home / "collector-0"
        for folder in (self.collector / SPOOL, self.collector / OUTBOX):
            folder.mkdir(parents=True)
        self.start()

    def start(self):
        self.starts += 1
        self.spool = Spool(self.bus, [self.home], f"{self.home.name}-{self.starts}")

    def write(self, name, content=b"x"):
        (self.collector / SPOOL / f"{name}-n2.safetensors").write_bytes(content)

    @property
    def spooled(self):
        return sorted(os.listdir(self.collector / SPOOL))


class Learner:
    """A store and what takes files into it."""

    def __init__(self, root, bus, key="run"):
        self.root, self.bus, self.staging = root, bus, root / "buffer" / ".arriving" / key
        self.start()

    def start(self):
        self.ingest = Ingest(self.bus, self.root / "buffer" / "fifo", self.staging)

    @property
    def names(self):
        return sorted(name.partition("-n")[0] for name in os.listdir(self.root / "buffer" / "fifo"))


def bundles(bus):
    return [f"{writer}/{name}" for writer in bus.names("out") for name in bus.names(f"out/{writer}")]


def test_files_arrive_in_numbered_bundles_and_reports_beside_them(tmp_path, bus):
    node, learner = Node(tmp_path, bus), Learner(tmp_path, bus)
    node.write("a", b"1")
    (node.collector / OUTBOX / "r.json").write_text("{}")
    node.spool.pump(flush=True)
    node.write("b", b"2")
    node.spool.pump(flush=True)
    assert bundles(bus) == ["node-1/000000000-n2", "node-1/000000001-n2"]
    assert node.spool.delivered == {"collector-0": 1}, "of reports"
    assert learner.ingest.pull() == 2
    assert learner.names == ["a", "b"]
    assert os.listdir(learner.staging / "reports") == ["r.json"]
    assert bundles(bus) == node.spooled == []
    assert node.spool.waiting == 0


def test_a_learner_or_node_that_ends_at_any_step_is_followed_by_one_that_goes_on(tmp_path, bus, monkeypatch):
    """The first call of each function that moves files fails once, before and after its work; a reader deletes what arrives."""
    node, learner = Node(tmp_path, bus), Learner(tmp_path, bus)
    seen, number = [], 0
    store = tmp_path / "buffer" / "fifo"
    for owner, name in ((os, "rename"), (os, "replace"), (os, "unlink"), (Bus, "put"), (Bus, "get"), (Bus, "delete")):
        for after in (False, True):
            for which in range(3):
                calls, real = [0], getattr(owner, name)

                def fail(*args, real=real, calls=calls, after=after, which=which, **options):
                    calls[0] += 1
                    found = real(*args, **options) if after or calls[0] != which + 1 else None
                    if calls[0] == which + 1:
                        raise KeyboardInterrupt
                    return found

                for _ in range(2):
                    node.write(f"f{number:03d}")
                    number += 1
                for _ in range(2):
                    with monkeypatch.context() as patch, pytest.MonkeyPatch.context():
                        patch.setattr(owner, name, fail)
                        try:
                            node.spool.pump(flush=True)
                            learner.ingest.pull()
                        except KeyboardInterrupt:
                            pass
                    node.start()
                    learner.start()
                    for path in store.iterdir():
                        seen.append(path.name)
                        path.unlink()
    node.spool.pump(flush=True)
    learner.ingest.pull()
    seen += os.listdir(store)
    assert sorted(seen) == [f"f{i:03d}-n2.safetensors" for i in range(number)], "none lost, none twice"


def test_what_comes_out_of_order_waits(tmp_path, bus):
    node, learner = Node(tmp_path, bus), Learner(tmp_path, bus)
    for name in "ab":
        node.write(name)
        node.spool.pump(flush=True)
    first, _ = bundles(bus)
    content = bus.get(f"out/{first}")
    bus.delete(f"out/{first}")
    assert learner.ingest.pull() == 0
    bus.put(f"out/{first}", content)
    assert learner.ingest.pull() == 2
    assert learner.names == ["a", "b"]


def test_files_are_replaced_deleted_twice_and_missing_without_harm(bus):
    bus.put("a/b", b"1")
    bus.put("a/b", {"count": 2})
    assert bus.get_json("a/b") == {"count": 2}
    assert bus.names("a") == ["b"]
    for _ in range(2):
        bus.delete("a/b")
        assert bus.names("a") == bus.names("nowhere") == []
        assert bus.get_json("a/b") is None
    with pytest.raises(FileNotFoundError):
        bus.get("a/b")


def test_a_file_whose_writer_was_killed_is_put_again_and_nothing_else_stays(tmp_path):
    code = "import os, sys; from amago.launch.bus import Bus; os.replace = lambda *names: os._exit(9); Bus(sys.argv[1]).put('out/n/0', b'1')"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "bus")], check=False).returncode == 9
    bus = Bus(str(tmp_path / "bus"))
    assert bus.names("out/n") == []
    bus.put("out/n/0", b"12")
    assert os.listdir(tmp_path / "bus" / "out" / "n") == ["0"]
    assert bus.get("out/n/0") == b"12"


def test_a_bus_goes_on_after_its_server_was_down(tmp_path, monkeypatch):
    with stores.over_ssh(tmp_path, monkeypatch) as server:
        node, learner = Node(tmp_path, bus := Bus(server.url())), Learner(tmp_path, bus)
        node.write("a")
        node.spool.pump(flush=True)
        connections = launching.family(server.process.pid)
        server.end()
        for pid in connections:
            os.kill(pid, signal.SIGKILL)
        node.write("b")
        with pytest.raises(Exception):  # noqa: B017 - of the storage client
            node.spool.pump(flush=True)
        server.start()
        node.spool.pump(flush=True)
        while learner.names != ["a", "b"]:
            learner.ingest.pull()


def test_a_host_whose_key_is_not_known_is_refused(tmp_path, monkeypatch):
    with stores.over_ssh(tmp_path, monkeypatch) as server:
        (server.home / ".ssh" / "known_hosts").write_text("")
        with pytest.raises(ValueError, match="HostKeyNotVerifiable"):
            Bus(server.url())


def test_two_runs_share_a_store(tmp_path):
    for key in "ab":
        node, learner = Node(tmp_path, bus := Bus(str(tmp_path / f"bus-{key}")), key), Learner(tmp_path, bus, key)
        node.write(key)
        node.spool.pump(flush=True)
        learner.ingest.pull()
    assert learner.names == ["a", "b"]


def test_an_unreadable_file_does_not_stop_the_others(tmp_path, bus, caplog):
    node, learner = Node(tmp_path, bus), Learner(tmp_path, bus)
    (node.collector / SPOOL / "a-n2.safetensors").mkdir()
    node.write("b")
    node.spool.pump(flush=True)
    learner.ingest.pull()
    assert learner.names == ["b"]
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize("name", ["../x", ".x", "other/x", "x/", "/etc/x", "a\\b", "compressed"])
def test_a_bundle_that_no_node_wrote_is_put_aside(tmp_path, bus, name, caplog):
    learner, file = Learner(tmp_path, bus), tmp_path / "made"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if name == "compressed" else zipfile.ZIP_STORED) as archive:
        archive.writestr("x" if name == "compressed" else name, bytes(10**6))
    bus.put("out/w/000000000-n1", file.read_bytes())
    bus.put("out/w/000000001-n1", b"torn")
    learner.ingest.pull()
    assert learner.names == bundles(bus) == []
    assert len(os.listdir(learner.staging / "refused")) == 2
    assert "is no readable bundle" in caplog.text
    assert json.loads((learner.staging / "arrived.json").read_text())["next"] == {"w": 2}


def test_a_bus_that_is_out_of_reach_loses_nothing(tmp_path, bus, monkeypatch):
    node, learner = Node(tmp_path, bus), Learner(tmp_path, bus)
    with monkeypatch.context() as patch:
        patch.setattr(Bus, "put", lambda *_: (_ for _ in ()).throw(OSError("no route")))
        for name in "ab":
            node.write(name)
            with pytest.raises(OSError, match="no route"):
                node.spool.pump(flush=True)
    assert node.spool.waiting > 0
    node.spool.pump(seconds=60)
    learner.ingest.pull()
    assert learner.names == ["a", "b"]


@pytest.mark.parametrize("made", ["link", "open", "file", "another's"])
def test_a_directory_that_others_may_write_is_refused(tmp_path, made):
    path = tmp_path / "bus"
    if made == "link":
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to(tmp_path / "elsewhere")
    elif made == "file":
        path.touch()
    else:
        path.mkdir()
        path.chmod(0o777 if made == "open" else 0o700)
    if made == "another's":
        if os.geteuid():
            pytest.skip("needs another user's directory")
        os.chown(path, 12345, 12345)
    with pytest.raises(ValueError, match="a directory of your own"):
        Bus(str(path))
