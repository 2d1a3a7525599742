"""Logs as tables of limited size, and logs that are read while they are written."""

import json
import os

import numpy as np
import pytest
from runs_on_disk import RETURN, append, phases, row, write_run

from amago.run.plots import read_metrics
from amago.run.report.follow import SMALL, Follower
from amago.run.report.log import LIMIT, Log
from amago.run.report.runs import read_run


def column(log, section="val", name=RETURN, axis="env_steps"):
    x, y = log.column(section, axis, name)
    return x.tolist(), y.tolist()


def filled(rows, limit=LIMIT):
    log = Log(limit)
    for r in rows:
        log.add(r)
    return log


# ---- tables ----------------------------------------------------------------------------------------------------------------


def test_short_logs_are_kept_as_they_are():
    log = filled(r for epoch in range(5) for r in phases(epoch, epoch / 4))
    assert column(log) == ([0, 100, 200, 300, 400], [0, 0.25, 0.5, 0.75, 1])
    assert column(log, "train", "Critic Loss", "grad_steps")[0] == [10, 20, 30, 40, 50]


@pytest.mark.parametrize("rows", [399, 400, 401, 1_001, 12_345])
def test_long_logs_are_means_of_neighbours(rows):
    values = np.random.default_rng(0).normal(size=rows)
    log = filled(row("val", {RETURN: v}, steps=i) for i, v in enumerate(values))
    x, y = map(np.array, column(log))
    assert LIMIT // 2 - 1 <= len(x) <= LIMIT
    merged = 1 << max(0, int(np.ceil(np.log2(rows / LIMIT))))
    expected = [values[i : i + merged].mean() for i in range(0, rows, merged)]
    assert y == pytest.approx(expected)
    assert (np.diff(x) > 0).all()


def test_what_is_not_finite_or_not_there_is_left_out():
    log = filled(
        [
            row("val", {RETURN: 1}),
            row("val", {RETURN: None}, steps=1),
            row("val", {"x": 4}, steps=2),
            row("val", {RETURN: 3}, steps=3),
        ]
    )
    assert column(log) == ([0, 3], [1, 3])
    assert column(log, name="x") == ([2], [4])
    assert column(log, name="y") == ([], [])
    assert log.not_finite == 1
    assert log.metric_names("val") == [RETURN, "x"]


@pytest.mark.parametrize(
    "bad",
    [[], {"epoch": 1}, {**row("val", {}), "epoch": "1"}, {**row("val", {}), "values": [1]}, row("val", {"a": "b"}), 3, None],
)
def test_what_is_no_row_is_refused_and_changes_nothing(bad):
    log = filled(phases(0, 1))
    with pytest.raises(ValueError, match="no row of a log"):
        log.add(bad)
    assert (log.rows, column(log)) == (3, ([0], [1]))


# ---- runs that go back -----------------------------------------------------------------------------------------------------


def test_what_a_killed_run_has_abandoned_is_dropped():
    log = filled(r for epoch in range(4) for r in phases(epoch, epoch))
    for r in [*phases(2, 20, seconds=65.0), *phases(3, 30, seconds=95.0)]:
        log.add(r)
    assert column(log) == ([0, 100, 200, 300], [0, 1, 20, 30])
    assert column(log, "train", "Critic Loss", "grad_steps")[0] == [10, 20, 30, 40]
    assert (log.went_back, log.several, log.highest) == (1, False, (3, 400, 40, 125.0))


def test_a_long_log_goes_back_to_about_the_same_place():
    log = filled(row("train", {"x": 0}, i, i, i, i) for i in range(10_000))
    for i in range(6_000, 7_000):
        log.add(row("train", {"x": 1}, i, i, i, i))
    x, y = map(np.array, column(log, "train", "x"))
    assert x.max() == pytest.approx(7_000, abs=64)
    assert (y[x < 5_900] == 0).all()
    assert (y[x > 6_100] == 1).all()


def test_a_learner_and_collectors_in_one_log_lose_nothing():
    log = Log()
    for epoch in range(5):
        log.add(row("val", {RETURN: epoch}, epoch, 100 * epoch, 0, 7.0 * epoch))
        log.add(row("train", {"x": 1}, epoch, 0, 10 * epoch + 10, 5.0 * epoch))
        log.add(row("val", {RETURN: -1}, 0, 0, 0, 0.5))  # another collector that has just begun
    assert log.several
    assert log.went_back == 0
    assert len(column(log)[0]) == 10
    assert len(column(log, "train", "x", "grad_steps")[0]) == 5


# ---- files -----------------------------------------------------------------------------------------------------------------


def test_only_what_was_appended_is_read(tmp_path):
    path = write_run(tmp_path / "r", (1, 2))
    follower = Follower(path / "metrics.jsonl")
    assert follower.refresh()
    assert not follower.refresh()
    append(path, *phases(2, 3))
    assert follower.refresh()
    assert follower.log.rows == 9
    assert column(follower.log)[1] == [1, 2, 3]


def test_a_row_that_is_being_written_is_read_when_it_is_complete(tmp_path):
    path = write_run(tmp_path / "r", (1,)) / "metrics.jsonl"
    line = json.dumps(row("val", {RETURN: 2, "é": 1}, 1, 100, 10, 40), ensure_ascii=False).encode() + b"\n"
    follower = Follower(path)
    for i in range(len(line)):
        follower.refresh()
        assert follower.log.rows == 3
        with path.open("ab") as file:
            file.write(line[i : i + 1])
    follower.refresh()
    assert (follower.log.rows, follower.problems) == (4, [])


def test_a_torn_row_is_named_and_the_run_goes_on(tmp_path):
    path = write_run(tmp_path / "r", (1,))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 1, "va')
    follower = Follower(path / "metrics.jsonl")
    follower.refresh()
    assert follower.problems == []
    with (path / "metrics.jsonl").open("a") as file:
        file.write("\n")  # what a resumed run writes first
    append(path, *phases(1, 2))
    follower.refresh()
    assert column(follower.log)[1] == [1, 2]
    assert "an unreadable line" in follower.problems[0]


def test_a_file_that_was_replaced_or_cut_is_read_anew(tmp_path):
    path = write_run(tmp_path / "r", (1, 2, 3)) / "metrics.jsonl"
    follower = Follower(path)
    follower.refresh()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]))
    follower.refresh()
    assert column(follower.log)[1] == [1]
    other = write_run(tmp_path / "other", (7, 8, 9, 10)) / "metrics.jsonl"
    os.replace(other, path)
    follower.refresh()
    assert column(follower.log)[1] == [7, 8, 9, 10]


def test_a_log_that_begins_anew_in_the_same_file_is_read_anew(tmp_path):
    path = write_run(tmp_path / "r", (1,)) / "metrics.jsonl"
    follower = Follower(path)
    follower.refresh()
    path.write_text("".join(json.dumps(r) + "\n" for e in range(4) for r in phases(e, 50 + e, seconds=0.25 + 30 * e)))
    follower.refresh()
    assert column(follower.log)[1] == [50, 51, 52, 53]


def long_log(path, rows=20_000):
    """An evaluation each 50 rows; scores rise from 0 to 1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for i in range(rows):
            values = {RETURN: i / rows} if i % 50 == 0 else {"Critic Loss": 1.0, "Skipped Updates": float(i // 100)}
            file.write(json.dumps(row("val" if i % 50 == 0 else "train", values, i // 50, 2 * i, i, 0.5 * i)) + "\n")


def test_a_sample_of_a_long_log_shows_its_curve_and_its_end(tmp_path):
    path = tmp_path / "r" / "metrics.jsonl"
    long_log(path)
    assert path.stat().st_size > 4 * SMALL
    follower = Follower(path)
    follower.refresh()
    assert (follower.sampled, follower.log.complete) == (True, False)
    assert follower.log.rows < 2_000
    x, y = map(np.array, column(follower.log))
    assert len(x) >= 30
    assert y == pytest.approx(x / 40_000)
    assert y[-1] == pytest.approx(19_950 / 20_000)
    assert follower.log.highest == (399, 39_998, 19_999, 9_999.5)
    assert follower.problems == []


def test_a_long_log_is_read_as_a_whole_bit_by_bit_while_it_grows(tmp_path):
    path = tmp_path / "r" / "metrics.jsonl"
    long_log(path)
    follower = Follower(path)
    follower.refresh()
    for i in range(3):
        follower.advance(0.001)
        append(path.parent, row("val", {RETURN: 2.0 + i}, 400 + i, 40_000 + i, 20_000 + i, 10_000.0 + i))
        follower.refresh()
        assert column(follower.log)[1][-1] == pytest.approx(2.0 + i)
    while follower.advance(0.05):
        pass
    assert not follower.sampled
    whole = read_run(path.parent).log
    assert (follower.log.complete, follower.log.rows, whole.rows) == (True, 20_003, 20_003)
    assert column(follower.log) == column(whole)
    assert follower.log.faults == {"Skipped Updates": 199.0}


def test_rows_longer_than_a_chunk_are_read(tmp_path):
    values = {f"Average Total Return in {'x' * 50}{i}": 1.0 for i in range(20_000)}
    append(tmp_path / "r", row("val", values), row("val", {RETURN: 2.0}, steps=1))
    follower = Follower(tmp_path / "r" / "metrics.jsonl")
    follower.refresh()
    while follower.advance(0.05):
        pass
    assert (follower.log.rows, follower.problems) == (2, [])


def test_the_tables_hold_what_the_log_holds(tmp_path):
    path = write_run(tmp_path / "r", range(50))
    log = read_run(path).log
    rows = read_metrics(path)
    for section in ("val", "train"):
        for name in log.metric_names(section):
            own = [r for r in rows if r["section"] == section and name in r["values"]]
            assert column(log, section, name, "wall_time") == (
                [r["wall_time"] for r in own], pytest.approx([r["values"][name] for r in own]),
            )  # fmt: skip
