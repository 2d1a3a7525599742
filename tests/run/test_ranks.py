"""Several ranks train as one process with all of their batches would, and stop, save and resume together."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rank_programs
import tiny
import torch
from tiny import rows

from amago.run import checkpoint

PROGRAM = Path(rank_programs.__file__)
TOGETHER = 30.0
"""Seconds within which all ranks end after a signal."""


def launch(program, directory, **options):
    """Two ranks, on a free port."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(PROGRAM),
        program,
        str(directory),
    ]
    return subprocess.Popen(
        command,
        env=tiny.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **options,
    )


def end(process):
    """End a launcher and its ranks, whatever happened to them; each rank leads a session of its own."""
    if process.poll() is None:
        process.terminate()
        try:
            process.communicate(timeout=TOGETHER + 10)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """What two ranks have left that have run the program `everything`."""
    where = tmp_path_factory.mktemp("ranks")
    tiny.learned(where, name="one-two-one", ckpt_interval=1).close()
    process = launch("everything", where)
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        end(process)
    assert process.returncode == 0, output
    return where


@pytest.fixture(scope="module")
def lives(directory):
    return [json.loads((directory / f"lives-{rank}.json").read_text()) for rank in (0, 1)]


def loaded(directory, name):
    return [torch.load(directory / f"{name}-{rank}.pt", weights_only=True) for rank in (0, 1)]


def assert_equal(a, b, tolerance):
    """All tensors together differ by no more than a share of their norm."""
    assert a.keys() == b.keys()
    norm = lambda tensors: float(torch.cat([t.double().flatten() for t in tensors]).norm())  # noqa: E731
    difference = norm([a[name].double() - b[name].double() for name in a])
    assert difference <= tolerance * norm(a.values()), difference / norm(a.values())


# ---- one batch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", rank_programs.CASES, ids="-".join)
def test_an_update_of_two_ranks_is_that_of_one_process_with_both_batches(tmp_path, directory, case):
    """The sequences of rank 0 are long and those of rank 1 short, so a mean of the ranks' means would be another number."""
    whole, ranks = rank_programs.updates(tmp_path, *case), loaded(directory, "-".join(case))
    assert not tiny.differing(ranks[0]["weights"], ranks[1]["weights"])
    for rank in ranks:
        assert_equal(whole["gradients"][0], rank["gradients"][0], 1e-6)
        assert_equal(whole["statistics"][0], rank["statistics"][0], 1e-6)
        inputs = [{k: v for k, v in s[0].items() if k.startswith("tstep")} for s in (whole["statistics"], rank["statistics"])]
        assert inputs[0]
        assert_equal(*inputs, 1e-14)
        assert_equal(whole["weights"], rank["weights"], 1e-5)


@pytest.mark.parametrize("case", rank_programs.CASES, ids="-".join)
def test_metrics_are_those_of_both_batches(tmp_path, directory, case):
    whole = rank_programs.updates(tmp_path, *case)["metrics"][0]
    ranks = [r["metrics"][0] for r in loaded(directory, "-".join(case))]
    assert whole.keys() == ranks[0].keys() == ranks[1].keys()
    sizes = {"Batch Size (in Timesteps)", "Unmasked Batch Size (in Timesteps)"}  # of each rank
    for name in whole.keys() - sizes:
        assert (ranks[0][name] + ranks[1][name]) / 2 == pytest.approx(whole[name], rel=1e-5, abs=1e-6), name
    for name in sizes:
        assert ranks[0][name] + ranks[1][name] == whole[name]
    assert ranks[0]["Unmasked Batch Size (in Timesteps)"] > 3 * ranks[1]["Unmasked Batch Size (in Timesteps)"]


# ---- one run --------------------------------------------------------------------------------------------------------------


def test_ranks_collect_evaluate_and_learn_together(directory, lives):
    (seed, steps, updates, test), other = (life["normal"] for life in lives)
    assert [seed, steps, updates, test] == other, "also the seed, which was drawn"
    assert not tiny.differing(*loaded(directory, "normal"))
    assert steps == 2 * 2 * 2 * 12, "epochs, ranks, actors, steps"
    assert test["Number of Rollouts"] == 7
    found = rows(directory / "normal")
    assert [r["values"]["Number of Rollouts"] for r in found if r["section"] == "val"] == [5, 5]
    assert [r["values"]["Number of Rollouts"] for r in found if r["section"] == "rollout"] == [8, 8]
    assert [r["env_steps"] for r in found if r["section"] == "rollout"] == [48, 96]
    assert [r["values"]["trajectories"] for r in found if r["section"] == "buffer"] == [8, 16], "of both ranks, once"
    assert len([r for r in found if r["section"] == "test"]) == 1


def test_a_run_resumes_with_more_ranks_and_with_fewer(directory, lives, capsys):
    assert lives[0]["one-two-one"] == lives[1]["one-two-one"] == [2, 24 + 48, 4]
    e = tiny.started(directory, name="one-two-one", resume="auto", ckpt_interval=1, epochs=3)
    assert (e.epoch, e.env_steps, e.updater.grad_steps) == (2, 72, 4)
    e.learn()
    assert (e.epoch, e.env_steps, e.updater.grad_steps) == (3, 96, 6)


def test_a_resumed_run_of_two_ranks_repeats_what_it_would_have_done(directory):
    straight, halved = loaded(directory, "straight"), loaded(directory, "halved")
    assert not tiny.differing(straight[0], halved[0])
    assert not tiny.differing(straight[1], halved[1])


def test_gradients_of_an_unfinished_update_of_two_ranks_are_kept(directory):
    """Of two batches, one was before the stop. Its gradients differ between the ranks, and a state has one set: their mean."""
    (straight, _), (halved, other) = loaded(directory, "straight-2"), loaded(directory, "halved-2")
    assert_equal(straight, halved, 1e-4)
    assert not tiny.differing(halved, other)


# ---- one end --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", rank_programs.STOPS)
def test_a_signal_to_any_rank_stops_all(directory, lives, name):
    signals = rank_programs.STOPS[name][1]
    ends = [life[name] for life in lives]
    assert [e["code"] for e in ends] == [128 + max(signals.values())] * 2
    assert all(e["seconds"] < TOGETHER for e in ends), "where one rank alone would collect or evaluate for a minute"
    assert ends[0]["progress"] == ends[1]["progress"]
    assert ends[0]["weights"] == ends[1]["weights"]
    newest = checkpoint.newest_complete(directory / name / "ckpts" / "training_states")
    state = checkpoint.load_training_state(newest)[2]
    assert len(state["ranks"]) == 2
    assert [state["epoch"], state["collected"], state["trained"]] == ends[0]["progress"][:3]
    assert sum(state["frames_by_env"].values()) == ends[0]["progress"][3]


@pytest.fixture
def endless(tmp_path):
    """Two ranks that run until a signal ends them: the launcher, and the ranks' process ids."""
    process = launch("endless", tmp_path)
    try:
        wait_for(
            lambda: (tmp_path / "endless" / "metrics.jsonl").is_file() and any(r["epoch"] for r in rows(tmp_path / "endless")),
            process,
        )
        yield process, [int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1)]
    finally:
        end(process)


def wait_for(condition, process, seconds=90.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.1)


def test_a_signal_to_the_launcher_stops_all_ranks(tmp_path, endless):
    process, pids = endless
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=TOGETHER)
    assert time.monotonic() - began < TOGETHER
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert [(tmp_path / f"code-{rank}").read_text() for rank in (0, 1)] == ["143", "143"]
    e = tiny.started(tmp_path, name="endless", resume="auto", epochs=10**6)
    assert e.updater.grad_steps > 0
    assert e.updater.grad_steps == max(r["grad_steps"] for r in rows(tmp_path / "endless"))
