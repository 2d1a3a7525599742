"""What a run does now, as far as its files say."""

import json
import os
import socket
import subprocess
import sys
import time
from datetime import datetime

import pytest
from runs_on_disk import append, phases, row, write_run, write_settings

from amago.run.report.follow import Follower
from amago.run.report.runs import read_run, with_settings
from amago.run.report.status import duration, status_of


def status(path, silent=0.0):
    """The status so many seconds after the newest row."""
    run = read_run(path)
    return status_of(run, run.changed + silent)


def lock(path, pid, host=None, since=None):
    since = since or datetime.now().astimezone().isoformat(timespec="seconds")
    (path / ".lock").write_text(json.dumps({"pid": pid, "host": host or socket.gethostname(), "since": since}))


@pytest.fixture
def half(tmp_path):
    """A run of ten epochs, five of which are done; an epoch takes 30 s."""
    path = write_run(tmp_path / "r", range(5), settings=False)
    write_settings(path, epochs=10, seed=0)
    return path


def test_a_run_that_writes_is_running_and_says_when_it_will_be_done(half):
    found = status(half, silent=5)
    assert (found.state, found.epochs, found.done, found.share) == ("running", 10, 5, 0.5)
    assert found.left == pytest.approx(150, rel=0.3)
    assert "5 s ago" in found.why


def test_a_run_that_has_long_been_silent_has_stopped(half):
    assert status(half, silent=100).state == "running"
    found = status(half, silent=200)
    assert (found.state, found.left) == ("stopped", None)
    append(half, row("val", {}, 5, 500, 50, 1_000.0))  # an epoch of 850 s: pauses of that length are usual
    assert status(half, silent=2_000).state == "running"
    assert status(half, silent=3_000).state == "stopped"


def test_the_process_that_holds_the_lock_decides(half):
    lock(half, os.getpid())
    assert status(half, silent=9_999).state == "running"
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)
    lock(half, int(ended.stdout))
    found = status(half, silent=0)
    assert found.state == "stopped"
    assert "has ended" in found.why
    lock(half, int(ended.stdout), host="elsewhere")  # nothing is known of processes there
    assert status(half, silent=0).state == "running"


def test_a_process_that_got_the_id_later_is_another(half):
    lock(half, os.getpid(), since="2020-01-01T00:00:00+00:00")
    assert status(half).state == "stopped"


def test_a_process_that_ended_and_was_not_collected_by_its_parent_has_ended(half):
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    process.stdout.read()  # until it ends
    deadline = time.monotonic() + 30
    lock(half, process.pid)
    while status(half).state != "stopped":
        assert time.monotonic() < deadline
    process.stdout.close()
    process.wait()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', '{"pid": -1, "host": "h", "since": ""}'])
def test_a_lock_that_says_nothing_is_none(half, text):
    (half / ".lock").write_text(text)
    assert status(half).state == "running"


def test_a_run_with_all_epochs_is_finished(half):
    append(half, *(r for epoch in range(5, 10) for r in phases(epoch, 1)))
    assert status(half, silent=1_000).state == "finished"
    assert status(half, silent=1).state == "running"  # its last epoch may not be over
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)
    lock(half, int(ended.stdout))
    assert status(half, silent=1).state == "finished"


def test_a_run_that_only_collects_finishes_too(tmp_path):
    append(tmp_path / "r", *(row("rollout", {}, epoch, 100, 0, 30.0 * epoch) for epoch in range(3)))
    write_settings(tmp_path / "r", epochs=3)
    assert status(tmp_path / "r", silent=1_000).state == "finished"


def test_a_run_without_a_row_is_starting(tmp_path):
    path = write_run(tmp_path / "r", ())
    assert status(path).state == "starting"
    assert status(path, silent=1_000).state == "stopped"


def test_without_settings_it_is_not_known_how_far_a_run_is(tmp_path):
    found = status(write_run(tmp_path / "r", range(5), settings=False))
    assert (found.state, found.epochs, found.share, found.left) == ("running", None, None, None)


def test_a_sampled_log_says_the_same(half):
    follower = Follower(half / "metrics.jsonl")
    follower.refresh()
    run = with_settings(half, follower)
    assert status_of(run, run.changed).done == 5


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.7, "12 s"), (200, "3 min 20 s"), (3720, "1 h 02 min"), (3 * 86_400 + 4 * 3600, "3 d 04 h")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text
