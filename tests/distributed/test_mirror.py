"""What collectors write is delivered, and stays where it is if it cannot be."""

import time

import pytest

from amago.distributed import Answer, Ingest, LocalLink
from amago.distributed import mirror as module
from amago.distributed.mirror import BUNDLE_BYTES, Mirror
from amago.run.roles.protocol import outbox_of, spool_of


class OneNode:
    """A collector's directory, and the learner's store; ``share_disk`` as of `Mirror`."""

    def __init__(self, root, share_disk):
        self.directory, self.store, self.inbox = root / "collector-0", root / "buffer" / "fifo", root / "reports"
        self.said = []
        spool_of(self.directory).mkdir(parents=True)
        outbox_of(self.directory).mkdir(parents=True)
        self.ingest = Ingest(self.store, self.inbox)
        self.link = LocalLink(self.ingest, lambda beats: self.said.append(beats) or Answer(7, pause=True))
        self.mirror = Mirror(self.link, [self.directory], share_disk)

    def spool(self, name, size=3):
        (spool_of(self.directory) / name).write_bytes(bytes(size))

    @property
    def waiting(self):
        return sorted(p.name for p in spool_of(self.directory).iterdir())

    @property
    def arrived(self):
        return sorted(p.name for p in self.store.iterdir())


@pytest.fixture(params=[True, False], ids=["shared-disk", "content"])
def node(request, tmp_path):
    return OneNode(tmp_path, request.param)


def test_files_go_to_the_store_and_reports_to_the_learner(node):
    node.spool("w-0.safetensors")
    (outbox_of(node.directory) / "r-0.json").write_text("{}")
    answer = node.mirror.pump({"collector-0": {"steps": 5}})
    assert (node.arrived, node.waiting) == (["w-0.safetensors"], [])
    assert (node.inbox / "r-0.json").read_text() == "{}"
    assert list(outbox_of(node.directory).iterdir()) == []
    assert (answer.version, answer.pause, answer.stop) == (7, True, False)
    assert node.said == [{"collector-0": {"steps": 5}}]
    assert node.mirror.delivered == 1


def test_without_files_there_is_an_answer_too(node):
    assert node.mirror.pump({}).version == 7


def test_a_bundle_has_a_limited_size(node):
    calls = []
    put = node.link.put
    node.link.put = lambda parcels, beats: calls.append([p.name for p in parcels]) or put(parcels, beats)
    for i, size in enumerate((BUNDLE_BYTES // 2, BUNDLE_BYTES // 2, 10, 2 * BUNDLE_BYTES)):
        node.spool(f"w-{i}.safetensors", size)
    node.mirror.pump({})
    assert calls == [["w-0.safetensors", "w-1.safetensors"], ["w-2.safetensors"], ["w-3.safetensors"]]


def test_a_bundle_has_a_limited_number_of_files(node, monkeypatch):
    monkeypatch.setattr(module, "BUNDLE_FILES", 2)
    calls = []
    put = node.link.put
    node.link.put = lambda parcels, beats: calls.append(len(parcels)) or put(parcels, beats)
    for i in range(5):
        node.spool(f"w-{i}.safetensors")
    node.mirror.pump({})
    assert calls == [2, 2, 1]
    assert len(node.arrived) == 5


def test_files_that_are_not_complete_stay(node):
    node.spool(".tmp-00000000-1-abc")
    node.mirror.pump({})
    assert node.arrived == []
    assert node.waiting == [".tmp-00000000-1-abc"]


def test_what_cannot_be_delivered_is_kept_and_delivered_later(node, monkeypatch, caplog):
    node.spool("w-0.safetensors")
    with monkeypatch.context() as m:
        m.setattr(node.link, "put", lambda parcels, beats: (_ for _ in ()).throw(OSError("no way")))
        for _ in range(3):
            node.mirror.pump({})
    assert node.waiting == ["w-0.safetensors"]
    assert len([r for r in caplog.records if "no way" in r.getMessage()]) == 1
    node.mirror.pump({})
    assert (node.arrived, node.waiting) == (["w-0.safetensors"], [])


def test_an_answer_that_is_lost_does_not_double_files(node, monkeypatch):
    node.spool("w-0.safetensors")
    put = node.link.put

    def lost(parcels, beats):
        put(parcels, beats)
        raise OSError("the answer is lost")

    with monkeypatch.context() as m:
        m.setattr(node.link, "put", lost)
        node.mirror.pump({})
    (node.store / "w-0.safetensors").unlink()
    node.mirror.pump({})
    assert (node.arrived, node.waiting) == ([], [])


def test_collectors_pause_while_too_much_waits(node, monkeypatch, caplog):
    mirror, reachable = Mirror(node.link, [node.directory], node.mirror.share_disk, most_waiting=1000), False
    put = node.link.put

    def perhaps(parcels, beats):
        if not reachable:
            raise OSError("no way")
        return put(parcels, beats)

    monkeypatch.setattr(node.link, "put", perhaps)
    monkeypatch.setattr(module, "_COUNT_SECONDS", 0.0)
    for i in range(4):
        node.spool(f"w-{i}.safetensors", 300)
        for _ in range(20):
            time.sleep(0.002)  # more than ten times as long as counting takes
            answer = mirror.pump({})
        assert answer.pause == (i == 3)
        assert mirror.waiting == 300 * (i + 1)
    assert len([r for r in caplog.records if "collectors pause until they are" in r.getMessage()]) == 1
    reachable = True
    assert mirror.pump({}).version == 7
    assert (mirror.waiting, node.waiting, len(node.arrived)) == (0, [], 4)
