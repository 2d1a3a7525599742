"""Files arrive once, whatever is repeated."""

import errno
import os

import pytest

from amago.distributed import Ingest
from amago.distributed import ingest as module


@pytest.fixture
def target(tmp_path):
    return tmp_path / "buffer" / "fifo"


def spooled(tmp_path, name, content=b"abc"):
    path = tmp_path / "spool" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return name, path


def names(directory):
    return sorted(os.listdir(directory))


def test_a_file_is_moved(tmp_path, target):
    ingest = Ingest(target)
    name, path = spooled(tmp_path, "a-1.safetensors")
    assert ingest.take([(name, path)]) == 1
    assert names(target) == [name]
    assert (target / name).read_bytes() == b"abc"
    assert not path.exists()


def test_content_from_another_node_is_written(target):
    assert Ingest(target).take([("a-1.safetensors", b"abc")]) == 1
    assert (target / "a-1.safetensors").read_bytes() == b"abc"


def test_a_file_that_arrived_does_not_arrive_again_even_if_a_reader_has_deleted_it(tmp_path, target):
    ingest = Ingest(target)
    ingest.take([("a-1.safetensors", b"abc")])
    (target / "a-1.safetensors").unlink()
    again = spooled(tmp_path, "a-1.safetensors")
    assert ingest.take([again]) == 0
    assert names(target) == []
    assert not again[1].exists(), "the sender is done with it"
    ingest.close()
    assert Ingest(target).take([("a-1.safetensors", b"abc")]) == 0, "nor for the next one"


def test_a_file_on_another_disk_is_copied(tmp_path, target, monkeypatch):
    rename = os.rename

    def elsewhere(source, to):
        if "spool" in str(source):
            raise OSError(errno.EXDEV, "another disk")
        rename(source, to)

    ingest = Ingest(target)
    monkeypatch.setattr(module.os, "rename", elsewhere)
    name, path = spooled(tmp_path, "a-1.safetensors")
    assert ingest.take([(name, path)]) == 1
    assert (target / name).read_bytes() == b"abc"
    assert not path.exists()


@pytest.mark.parametrize("journaled", [True, False])
def test_what_was_staged_before_a_kill_arrives_with_the_next_ingest(target, journaled):
    Ingest(target).close()
    staging = module.staging_of(target)
    (staging / "a-1.safetensors").write_bytes(b"abc")
    if journaled:
        with open(staging / "journal", "a") as f:
            f.write("a-1.safetensors\n")
    ingest = Ingest(target)
    assert names(target) == ["a-1.safetensors"]
    assert ingest.take([("a-1.safetensors", b"abc")]) == 0


def test_half_a_line_of_the_journal_does_not_count(target):
    Ingest(target).take([("a-1.safetensors", b"abc")])
    with open(module.staging_of(target) / "journal", "a") as f:
        f.write("b-1.safete")
    ingest = Ingest(target)
    assert list(ingest.arrived) == ["a-1.safetensors"]
    assert ingest.take([("b-1.safetensors", b"abc")]) == 1
    ingest.close()
    assert list(Ingest(target).arrived) == ["a-1.safetensors", "b-1.safetensors"]


def test_a_full_disk_loses_nothing(tmp_path, target, monkeypatch):
    ingest = Ingest(target)
    file = spooled(tmp_path, "a-1.safetensors")
    with monkeypatch.context() as m:

        def full(fd, data):
            os.write(fd, bytes(data)[:4])
            raise OSError(errno.ENOSPC, "no space left")

        m.setattr(module, "write_all", full)
        with pytest.raises(OSError, match="no space left"):
            ingest.take([file])
    assert names(target) == []
    assert "a-1.safetensors" not in ingest.arrived
    ingest.close()
    Ingest(target)
    assert names(target) == ["a-1.safetensors"]


def test_after_a_full_disk_the_same_ingest_goes_on(tmp_path, target, monkeypatch):
    ingest = Ingest(target)
    with monkeypatch.context() as m:
        m.setattr(module, "write_all", lambda fd, data: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space left")))
        with pytest.raises(OSError, match="no space left"):
            ingest.take([spooled(tmp_path, "a-1.safetensors")])
    assert ingest.take([spooled(tmp_path, "b-1.safetensors")]) == 2
    assert names(target) == ["a-1.safetensors", "b-1.safetensors"]


@pytest.mark.parametrize("name", ["", ".hidden", "../escape", "a/b", "journal", "two\nlines"])
def test_other_names_are_refused(target, name):
    with pytest.raises(ValueError, match="not the name of a file"):
        Ingest(target).take([(name, b"abc")])


def test_the_journal_forgets_the_oldest_names_only(target, monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED", 3)
    ingest = Ingest(target)
    for i in range(8):
        ingest.take([(f"a-{i}.safetensors", b"")])
    ingest.close()
    ingest = Ingest(target)
    assert list(ingest.arrived) == [f"a-{i}.safetensors" for i in (5, 6, 7)]
    ingest.take([("a-8.safetensors", b"")])
    ingest.close()
    assert list(Ingest(target).arrived)[-1] == "a-8.safetensors"


def test_reports_are_moved_and_replaced(tmp_path, target):
    ingest = Ingest(target, tmp_path / "reports")
    ingest.take_reports([spooled(tmp_path, "r-1.json", b"{}")])
    assert names(tmp_path / "reports") == ["r-1.json"]
    assert names(tmp_path / "spool") == []
