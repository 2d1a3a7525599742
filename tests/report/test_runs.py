"""Runs as their files say: logs, also of runs that were killed; statistics; groups and their names; state and remaining time."""

import json
import os
import socket
import subprocess
import sys
import time
from datetime import datetime

import numpy as np
import pytest
from runs_on_disk import RETURN, append, phases, row, write_run, write_settings

from amago.report import curves
from amago.report.runs import LIMIT, Group, Log, base_name, differences, find_runs, group_runs, name_runs, read_run, status_of
from amago.run.results import by_attempt


def column(log, section="val", name=RETURN, axis="env_steps"):
    x, y = log.column(section, axis, name)
    return x.tolist(), y.tolist()


@pytest.mark.parametrize("rows", [5, 399, 400, 401, 12_345])
def test_long_logs_are_means_of_neighbours(rows):
    values = np.random.default_rng(0).normal(size=rows)
    x, y = map(np.array, column(Log(row("val", {RETURN: v}, steps=i) for i, v in enumerate(values))))
    merged = -(-rows // LIMIT)
    assert min(rows, LIMIT // 2) <= len(x) <= LIMIT
    assert y == pytest.approx([values[i : i + merged].mean() for i in range(0, rows, merged)])
    assert (np.diff(x) > 0).all()


def test_a_learner_and_collectors_in_one_log_lose_nothing():
    log = Log()
    for epoch in range(5):
        log.add(row("val", {RETURN: epoch}, epoch, 100 * epoch, 0, 7.0 * epoch))
        log.add(row("train", {"x": 1}, epoch, 0, 10 * epoch + 10, 5.0 * epoch))
        log.add(row("val", {RETURN: -1}, 0, 0, 0, 0.5))  # another collector that has just begun
    assert (log.several, log.went_back) == (True, 0)
    assert len(column(log)[0]) == 10
    assert len(column(log, "train", "x", "grad_steps")[0]) == 5


def trimmed(values):
    """The mean of the middle half, one number at a time."""
    kept = sorted(values)[len(values) // 4 : len(values) - len(values) // 4]
    return sum(kept) / len(kept)


def test_the_interquartile_mean_leaves_out_a_quarter_on_both_sides():
    for runs in (1, 2, 3, 4, 7, 8, 20):
        values = np.random.default_rng(runs).standard_cauchy((runs, 5))
        assert curves.interquartile_mean(values) == pytest.approx([trimmed(column) for column in values.T])


@pytest.mark.parametrize(("name", "statistic"), [("mean", np.mean), ("IQM", trimmed)])
def test_bootstrap_intervals_are_those_of_a_loop(name, statistic):
    values = np.random.default_rng(1).normal(5.0, 2.0, (6, 3))
    rng = np.random.default_rng(123)
    drawn = [[statistic(rng.choice(column, len(column))) for column in values.T] for _ in range(2_000)]
    expected = np.quantile(drawn, [0.025, 0.975], axis=0)
    found = np.array(curves.interval(values, curves.STATISTICS[name]))
    assert (np.abs(found - expected) < 0.12 * (expected[1] - expected[0])).all()


def test_a_group_is_a_line_to_the_end_of_its_longest_run_at_places_with_a_value():
    a = curves.Curve(np.array([0.0, 10.0, 20.0]), np.array([0.0, 1.0, 2.0]))
    b = curves.Curve(np.array([10.0, 40.0]), np.array([3.0, 6.0]))
    both = curves.aggregate([a, b])
    assert (both.x.tolist(), both.y.tolist()) == ([0, 10, 20, 40], [0, 2, 3, 6])
    assert (both.low[1], both.high[1], both.low[3], both.high[3]) == (1, 3, 6, 6)
    near = curves.aggregate([a, curves.Curve(np.array([0.0, 20.5]), np.array([2.0, 4.0]))])
    assert near.y[-1] == 3.0, "a run that ends a moment earlier counts to the end"


def test_scores_by_attempt_are_found_by_their_numbers():
    for names, found in [
        (["Average Attempt 0 Success in a", "Average Attempt 10 Success in a"], {"Average Attempt # Success in a": [1, 11]}),
        (["Average Trial 1 Return in b", "Average Trial 0 Return in b"], {"Average Trial # Return in b": [1, 2]}),
        (["Average Game 1 Return in b", "Average Game 2 Return in b"], {"Average Game # Return in b": [1, 2]}),
        (["Average Step 100 Return in c", "Average Step 5 Return in c"], {"Average Step # Return in c": [5, 100]}),
        (["Average Attempt 0 Success in a", "Average Success in a 3"], {}),
    ]:
        assert {title: list(attempts) for title, attempts in by_attempt(names).items()} == found


def test_final_scores_are_means_of_the_last_fifth_of_updates(tmp_path):
    runs = [read_run(write_run(tmp_path / f"r{i}", range(11), seed=i, attempts=(0.5 * i, 1.0))) for i in range(2)]
    # evaluations at 0, 10, ..., 100 updates: 80, 90 and 100 count
    assert curves.late_mean(runs[0], "val", RETURN) == 9
    both = curves.final_scores(Group("g", runs), "val", {i: f"Average Attempt {i} Success in lake" for i in range(2)})
    assert (both.y.tolist(), both.low.tolist(), both.high.tolist()) == ([0.25, 1.0], [0.0, 1.0], [0.5, 1.0])


def test_values_have_the_unit_of_returns(tmp_path):
    path = tmp_path / "r"
    append(path, *phases(0, 1, train={"Q(s, a) (gamma=0.9)": 50.0, "Critic Loss": 50.0}))
    found = []
    for _ in range(2):
        found += [
            curves.series(read_run(path), "train", n, "env_steps").y.item() for n in ("Q(s, a) (gamma=0.9)", "Critic Loss")
        ]
        write_settings(path, parameters={"amago.agent.Agent.reward_multiplier": 10.0})
    assert found == [50, 50, 5, 50]


def groups_of(paths):
    return {g.name: [r.path.name for r in g.runs] for g in group_runs([read_run(p) for p in paths])}


def test_runs_are_found_below_directories_and_once(tmp_path):
    a, b = write_run(tmp_path / "x" / "a", (1,)), write_run(tmp_path / "x" / "deep" / "b", (1,))
    write_run(a / "ckpts" / "not_a_run", (1,))
    assert find_runs([tmp_path, a]) == [a, b]


def test_runs_of_other_settings_are_other_groups_whatever_their_names(tmp_path):
    rates = [1e-3, 1e-3, 1e-2]
    paths = [write_run(tmp_path / f"a_{i}", (1,), seed=i, learning_rate=rate) for i, rate in enumerate(rates)]
    assert groups_of(paths) == {"a, learning_rate=0.001": ["a_0", "a_1"], "a, learning_rate=0.01": ["a_2"]}
    named = differences([read_run(p).settings for p in paths])
    assert (named["learning_rate"], set(named)) == (rates, {"learning_rate", "seed", "run_name"})
    for i, path in enumerate(paths):
        path.rename(tmp_path / f"trial_{i}")
    assert list(groups_of(find_runs([tmp_path]))) == ["learning_rate=0.001", "learning_rate=0.01"], "trials of a search"


def test_groups_are_named_after_the_parts_that_differ_in_short(tmp_path):
    for i, part in enumerate(("GRUTrajEncoder", "FFTrajEncoder")):
        write_run(tmp_path / f"trial_{i}", (1,), settings=False)
        write_settings(tmp_path / f"trial_{i}", seed=0, traj_encoder_type=f"amago.nets.traj_encoders.{part}", bias=bool(i))
    assert list(groups_of(find_runs([tmp_path]))) == [
        "traj_encoder_type=GRUTrajEncoder, bias=False", "traj_encoder_type=FFTrajEncoder, bias=True",
    ]  # fmt: skip


def test_places_output_and_films_are_no_settings_and_other_callbacks_are(tmp_path):
    film = {"type": "amago.policy.filming.RecordVideo", "interval": 5}
    stop = {"type": "amago.run.callbacks.EarlyStopping", "patience": 3}
    own = [
        {}, {"callbacks": [film], "log_to_tensorboard": True, "progress": "none"}, {"callbacks": [film, stop]},
        {"callbacks": [stop], "log_to_wandb": True, "wandb_project": "p"}, {"max": 6},
    ]  # fmt: skip
    for i, fields in enumerate(own):
        write_run(tmp_path / f"a_{i}", (1,), settings=False)
        dataset = {"dset_root": f"/disk{i}", "dset_name": f"a_{i}", "max": fields.pop("max", 5)}
        usual = {"callbacks": [], "log_to_wandb": False, "log_to_tensorboard": False}
        write_settings(tmp_path / f"a_{i}", seed=i, dataset=dataset, **usual | fields)
    assert list(groups_of(find_runs([tmp_path])).values()) == [["a_0", "a_1"], ["a_2", "a_3"], ["a_4"]]


def test_runs_of_other_environments_or_other_code_are_other_groups(tmp_path):
    for i, (name, commit) in enumerate([("ice", "aaaa"), ("ice", "aaaa"), ("fire", "aaaa"), ("ice", "bbbb"), (None, "bbbb")]):
        extra = {f"Average Total Return in {name}": 1.0}
        path = write_run(tmp_path / f"r_{i}", (1,) if name else (), settings=False, extra=extra)
        write_settings(path, [{"git": {"commit": commit, "changed": False}}], seed=i)
    found = groups_of(find_runs([tmp_path]))
    assert list(found.values()) == [["r_0", "r_1"], ["r_2"], ["r_3", "r_4"]]


def test_one_seed_that_was_run_twice_is_one_sample(tmp_path):
    (group,) = group_runs([read_run(write_run(tmp_path / f"r_{i}", (i,), seed=min(i, 1))) for i in range(3)])
    assert (len(group.runs), len(group.seeds)) == (3, 2)


def test_names(tmp_path):
    """Without the number of a seed; and, where they clash, with as much of their path as they need."""
    bases = {
        "lake_seed0": "lake", "lake_trial_12": "lake", "lake-7": "lake", "lake": "lake", "7": "", "trial_0": "", "v2_test": "v2_test",
        "lake3_0/run": "lake3/run",
    }  # fmt: skip
    assert {name: base_name(name) for name in bases} == bases
    paths = [write_run(tmp_path / n, ()) for n in ("a/x/run", "b/x/run", "c/other")]
    runs = [read_run(p) for p in paths]
    name_runs(runs)
    assert [r.name for r in runs] == ["a/x/run", "b/x/run", "other"]


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


@pytest.fixture(scope="module")
def ended():
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_run_that_writes_is_running_and_one_that_has_long_been_silent_has_stopped(half):
    found = status(half, silent=5)
    assert (found.state, found.epochs, found.done, found.left) == ("running", 10, 5, pytest.approx(150, rel=0.3))
    assert "0:00:05 ago" in found.why
    assert [status(half, silent=silent).state for silent in (100, 200)] == ["running", "stopped"]
    assert status(half, silent=200).left is None
    append(half, row("val", {}, 5, 500, 50, 1_000.0))  # an epoch of 850 s: pauses of that length are usual
    assert [status(half, silent=silent).state for silent in (2_000, 3_000)] == ["running", "stopped"]


def test_the_process_that_holds_the_lock_decides(half, ended):
    lock(half, os.getpid())
    assert status(half, silent=9_999).state == "running"
    lock(half, os.getpid(), since="2020-01-01T00:00:00+00:00")
    assert status(half).state == "stopped", "a process that got the id later is another"
    lock(half, ended)
    assert (status(half).state, "has ended" in status(half).why) == ("stopped", True)
    lock(half, ended, host="elsewhere")  # nothing is known of processes there
    assert status(half).state == "running"
    for text in ("", "{", "[]", '{"pid": "x"}', '{"pid": -1, "host": "h", "since": ""}'):
        (half / ".lock").write_text(text)
        assert status(half).state == "running"


def test_a_process_that_ended_and_was_not_collected_by_its_parent_has_ended(half):
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    process.stdout.read()  # until it ends
    deadline = time.monotonic() + 250
    lock(half, process.pid)
    while status(half).state != "stopped":
        assert time.monotonic() < deadline
    process.stdout.close()
    process.wait()


def test_a_run_with_all_epochs_is_finished(half, tmp_path, ended):
    append(half, *(r for epoch in range(5, 10) for r in phases(epoch, 1)))
    assert status(half, silent=1_000).state == "finished"
    assert status(half, silent=1).state == "running"  # its last epoch may not be over
    lock(half, ended)
    assert status(half, silent=1).state == "finished"
    append(tmp_path / "s", *(row("rollout", {}, epoch, 100, 0, 30.0 * epoch) for epoch in range(3)))
    write_settings(tmp_path / "s", epochs=3)
    assert status(tmp_path / "s", silent=1_000).state == "finished", "it only collects"


def test_a_run_without_a_row_is_starting_and_without_settings_its_end_is_not_known(tmp_path):
    path = write_run(tmp_path / "r", ())
    assert [status(path, silent=silent).state for silent in (0, 1_000)] == ["starting", "stopped"]
    found = status(write_run(tmp_path / "s", range(5), settings=False))
    assert (found.state, found.epochs, found.left) == ("running", None, None)
