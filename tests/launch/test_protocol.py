"""The small files between a launcher and its processes, and the line that shows them."""

import errno
import os

import pytest

from amago.launch.launcher import progress_line
from amago.run.launched import protocol
from amago.run.launched.protocol import read_small, write_beat, write_small


def fill_the_disk(monkeypatch):
    def refuse(self, text, **kwargs):
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(protocol.Path, "write_text", refuse)


def test_a_full_disk_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch):
    write_small(tmp_path / "a.json", {"count": 1})
    fill_the_disk(monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        write_small(tmp_path / "a.json", {"count": 2})
    assert read_small(tmp_path / "a.json") == {"count": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_beat_on_a_full_disk_is_a_sign_of_life(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_beat(path, {"count": 1})
    os.utime(path, (0, 0))
    fill_the_disk(monkeypatch)
    write_beat(path, {"count": 2})
    assert read_small(path) == {"count": 1}
    assert path.stat().st_mtime > 0


LEARNER = {"state": "training", "epoch": 3, "epochs": 20, "updates": 1500, "steps": 60_000, "version": 4, "limits": "0.01:0.05"}


def test_it_says_what_each_role_does_how_fast_the_ratio_and_the_lag():
    collectors = [{"state": "collecting", "version": 4}, {"state": "collecting", "paused": "paused", "version": 2}, {}]
    line = progress_line(LEARNER, collectors, (12.5, 2000.0), replaced=1)
    assert line == (
        "learner training, epoch 3/20, 1,500 updates (12.5/s) | collectors: 1 collecting, 1 paused, 1 starting, 1 replaced; "
        "60,000 steps (2,000/s) | 0.025 updates/step in 0.01:0.05 | policy 4, lag 2"
    )


def test_before_the_first_step_there_is_no_ratio():
    line = progress_line({**LEARNER, "steps": 0}, [], (0.0, 0.0))
    assert "updates/step" not in line
    assert "lag" not in line
    assert progress_line({}, [], (0.0, 0.0)) == "learner starting"


def test_what_collectors_wait_for_and_what_is_not_delivered_is_said():
    collectors = [{"state": "collecting", "version": 2, "paused": why} for why in ("waiting for disk space", "paused")]
    collectors.append({"state": "collecting", "version": 1, "paused": "waiting for a newer policy"})
    line = progress_line({**LEARNER, "version": 9}, collectors, (0.0, 0.0), waiting=12_345_678)
    assert "collectors: 1 paused, 1 waiting for a newer policy, 1 waiting for disk space;" in line
    assert line.endswith("policy 9, lag 8 | 12 MB not delivered")
