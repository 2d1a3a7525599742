"""What a run prints: a line for each epoch, and a bar in a terminal."""

import re
import sys

import pytest
import tiny
from terminal import Terminal
from tiny import learned


def lines(text):
    return [line for line in text.splitlines() if line.startswith("epoch ")]


LINE = re.compile(
    r"epoch  3/10 \| 72 steps \| [\d,.]+ steps/s, [\d,.]+ updates/s \| return \S+, val \S+ \(Success in TMaze \d.\d+\), length 6 \| "
    r"actor loss \S+, critic loss \S+ \| 0:\d\d:\d\d left$"
)


def test_a_line_for_each_epoch(tmp_path, capsys):
    learned(tmp_path, verbose=True, epochs=10, val_interval=2).close()
    out, err = capsys.readouterr()
    assert len(lines(out)) == 10
    assert LINE.match(lines(out)[2]), lines(out)[2]
    assert "val" not in lines(out)[3], "an epoch without evaluation"
    assert lines(out)[-1].endswith("| done")
    assert "\r" not in out + err
    assert err == ""


@pytest.mark.parametrize(
    ("options", "expected"), [({"progress": "none"}, 0), ({"progress": "plain"}, 2), ({"verbose": False}, 0)]
)
def test_less_is_printed(tmp_path, capsys, monkeypatch, options, expected):
    monkeypatch.setattr(sys, "stderr", Terminal())
    learned(tmp_path, **{"verbose": True, "epochs": 2} | options).close()
    out = capsys.readouterr().out
    assert len(lines(out)) == expected
    assert ("trainable parameters" in out) == options.get("verbose", True)
    assert sys.stderr.getvalue() == ""


def test_a_bar_for_each_phase_in_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    e = learned(tmp_path, verbose=True, epochs=3, val_interval=1)
    drawn = [text.split(":")[0] for text in sys.stderr.getvalue().split("\r") if text.strip()]
    phases = [f"epoch {i}/3 {doing}" for i in (1, 2, 3) for doing in ("evaluating", "collecting", "training")]
    assert list(dict.fromkeys(drawn)) == phases
    assert len(lines(capsys.readouterr().out)) == 3
    before = len(sys.stderr.getvalue())
    e.evaluate_test(tiny.tmaze, timesteps=7)
    assert "test" in sys.stderr.getvalue()[before:]


def test_evaluations_by_themselves_are_printed(tmp_path, capsys):
    e = tiny.started(tmp_path, verbose=True)
    capsys.readouterr()
    e.evaluate_val()
    assert re.match(r"epoch 0 \| val \S+ \(Success", capsys.readouterr().out)
