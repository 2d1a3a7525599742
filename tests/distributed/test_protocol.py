"""The small files between a launcher and its processes."""

import errno
import os
import subprocess
import sys

import pytest

from amago.distributed.launcher import Plan
from amago.run.roles import protocol
from amago.run.roles.protocol import Assignment, read_soon, write_beat, write_soon


@pytest.fixture
def full_disk(monkeypatch):
    def refuse(self, text):
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(protocol.Path, "write_text", refuse)


def test_a_full_disk_leaves_the_old_content_and_nothing_else(tmp_path, request):
    write_soon(tmp_path / "a.json", {"count": 1})
    request.getfixturevalue("full_disk")
    with pytest.raises(OSError, match="No space left"):
        write_soon(tmp_path / "a.json", {"count": 2})
    assert read_soon(tmp_path / "a.json") == {"count": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_beat_on_a_full_disk_is_a_sign_of_life(tmp_path, request):
    path = tmp_path / "a.json"
    write_beat(path, {"count": 1})
    os.utime(path, (0, 0))
    request.getfixturevalue("full_disk")
    write_beat(path, {"count": 2})
    assert read_soon(path) == {"count": 1}
    assert path.stat().st_mtime > 0


def test_whether_the_launcher_lives():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assignment = Assignment("collector", 0, 1, "", launcher=process.pid)
    assert assignment.launcher_lives
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not assignment.launcher_lives, "a zombie does not live"
    process.communicate()
    assert not assignment.launcher_lives
    assert Assignment("collector", 0, 1, "").launcher_lives, "as far as anybody knows"


@pytest.mark.parametrize(
    ("field", "value"), [("max_policy_lag", -1), ("max_policy_lag", 1.5), ("max_policy_lag", True), ("max_undelivered", 0)]
)
def test_bounds_that_make_no_sense_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}.*{value!r}"):
        Plan([__file__], 1, **{field: value})
