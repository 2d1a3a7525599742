"""What a run prints: a line for each epoch, and a bar in a terminal."""

import re
import sys

import pytest
import tiny
from messages import naming
from terminal import Terminal
from tiny import experiment, learned

from amago.run import pace
from amago.run.checks import SettingsError
from amago.run.pace import COLLECT, EVALUATE, TRAIN, Pace, duration, rate, work


def lines(text):
    return [line for line in text.splitlines() if line.startswith("epoch ")]


LINE = re.compile(
    r"epoch  3/10 \| 72 steps \| [\d,.]+ steps/s, [\d,.]+ updates/s \| return \S+, val \S+ \(Success in TMaze \d.\d+\), length 6 \| "
    r"actor loss \S+, critic loss \S+ \| \d+ s left$"
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


def test_one_bar_in_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr("amago.run.progress._REDRAW_SECONDS", 0.0)
    e = learned(tmp_path, verbose=True, epochs=3, val_interval=1)
    drawn = [text.strip() for text in sys.stderr.getvalue().split("\r") if text.strip()]
    phases = [text.split("%")[0].rsplit(None, 1)[0] for text in drawn]
    assert list(dict.fromkeys(phases)) == [
        f"epoch {i}/3 {doing}" for i in (1, 2, 3) for doing in ("evaluating", "collecting", "training")
    ]
    shares = [int(text.split("%")[0].split()[-1]) for text in drawn]
    assert shares[0] == 0
    assert max(shares) >= 60
    last = drawn[-1]
    for part in ("return", "val", "steps/s", "updates/s", "s left"):
        assert part in last
    assert len(lines(capsys.readouterr().out)) == 3
    before = len(sys.stderr.getvalue())
    e.evaluate_test(tiny.tmaze, timesteps=7)
    assert "test" in sys.stderr.getvalue()[before:], "outside of learn() each phase has a bar of its own"
    e.close()


def test_evaluations_by_themselves_are_printed(tmp_path, capsys):
    e = tiny.started(tmp_path, verbose=True)
    capsys.readouterr()
    e.evaluate_val()
    assert re.match(r"epoch 0 \| val \S+ \(Success", capsys.readouterr().out)


def test_another_progress_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=naming("progress", "'rich'", "'plain'", "'none'", "'bar'")):
        tiny.started(tmp_path, progress="bar")


# ---- the time that is left -----------------------------------------------------------------------------------------------


def test_the_work_of_a_run(tmp_path):
    e = experiment(
        tmp_path,
        epochs=10,
        val_interval=4,
        start_learning_at_epoch=2,
        start_collecting_at_epoch=1,
        train_timesteps_per_epoch=12,
    )
    assert work(e, 0, 10) == {COLLECT: 9 * 24, TRAIN: 8 * 2, EVALUATE: 3, "rest": 10}
    assert work(e, 5, 10) == {COLLECT: 5 * 24, TRAIN: 5 * 2, EVALUATE: 1, "rest": 5}
    e.val_interval, e.train_timesteps_per_epoch, e.start_learning_at_epoch = None, None, float("inf")
    assert work(e, 0, 10) == {COLLECT: 0, TRAIN: 0, EVALUATE: 0, "rest": 10}


def test_time_left_is_work_by_pace():
    p = Pace()
    todo = {COLLECT: 100, TRAIN: 10, EVALUATE: 2, "rest": 5}
    assert p.time(todo) is None
    p.add(COLLECT, 50, 5.0)
    assert p.time(todo) is None, "nobody knows how long training takes"
    assert p.time({**todo, TRAIN: 0}) == pytest.approx(10.0)
    assert p.time(todo, (TRAIN, 4, 0.5)) is None, "too early"
    assert p.time(todo, (TRAIN, 4, 8.0)) == pytest.approx(10.0 + 20.0)
    p.add(TRAIN, 2, 2.0)
    p.add(EVALUATE, 1, 3.0)
    p.add("rest", 1, 1.0)
    assert p.time(todo) == pytest.approx(10.0 + 10.0 + 6.0 + 5.0)


def test_the_newest_phases_count():
    p = Pace()
    for _ in range(pace._REMEMBERED):
        p.add(TRAIN, 1, 100.0)
    for _ in range(pace._REMEMBERED):
        p.add(TRAIN, 1, 1.0)
    assert p.time({TRAIN: 7}) == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "?"), (0, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (185, "3:05 min"), (7799, "2:10 h"), (47 * 3600, "47:00 h"), (76 * 3600, "3 d 4 h")],
)  # fmt: skip
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_rates():
    assert [rate(x) for x in (0.01234, 4.561, 99.9, 123.4, 1234.5)] == ["0.0123", "4.56", "99.9", "123", "1,234"]
