"""Several ranks train as one process with all of their batches would, and stop, save and resume together."""

import fcntl
import functools
import json
import os

import pytest
import rank_programs
import tiny
import torch
from rank_launch import Launched, finish
from tiny import rows

from amago.run import checkpoint

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """What two ranks have left that have run the program `everything`: once, also where several workers share these tests."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    where = root / "ranks"
    with open(root / "ranks.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not where.is_dir():
            where.mkdir()
            tiny.learned(where, name="one-two-one", ckpt_interval=1).close()
            finish("everything", where)
    return where


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The updates of one process with all rows, by case."""
    return functools.cache(lambda case: rank_programs.updates(tmp_path_factory.mktemp("whole"), *case))


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


@pytest.mark.parametrize("case", rank_programs.CASES, ids="-".join)
def test_an_update_of_two_ranks_is_that_of_one_process_with_both_batches(directory, whole, case):
    """The sequences of rank 0 are long and those of rank 1 short, so a mean of the ranks' means would be another number."""
    whole, ranks = whole(case), loaded(directory, "-".join(case))
    assert {p.dtype for p in whole["gradients"][0].values()} == {torch.float64}
    assert not tiny.differing(ranks[0]["weights"], ranks[1]["weights"])
    for rank in ranks:
        for update in range(rank_programs.UPDATES):
            assert_equal(whole["gradients"][update], rank["gradients"][update], 1e-12)
            assert_equal(whole["statistics"][update], rank["statistics"][update], 1e-12)
        assert_equal(whole["weights"], rank["weights"], 1e-12)
        assert_equal(whole["acting"], rank["acting"], 1e-12)
        assert tiny.differing(rank["weights"], rank["acting"])
    assert {"tstep_encoder.in_norm.nu", "popart.nu"} <= whole["statistics"][0].keys()
    if "rescaled" in case:
        assert whole["statistics"][0]["critics.output_scale"] > 1.0


@pytest.mark.parametrize("case", rank_programs.CASES, ids="-".join)
def test_metrics_are_those_of_both_batches(directory, whole, case):
    whole = whole(case)["metrics"][0]
    ranks = [r["metrics"][0] for r in loaded(directory, "-".join(case))]
    assert whole.keys() == ranks[0].keys() == ranks[1].keys()
    sizes = {"Batch Size (in Timesteps)", "Unmasked Batch Size (in Timesteps)"}  # of each rank
    for name in whole.keys() - sizes:
        assert (ranks[0][name] + ranks[1][name]) / 2 == pytest.approx(whole[name], rel=1e-5, abs=1e-6), name
    for name in sizes:
        assert ranks[0][name] + ranks[1][name] == whole[name]
    assert ranks[0]["Unmasked Batch Size (in Timesteps)"] > 3 * ranks[1]["Unmasked Batch Size (in Timesteps)"]


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
    assert all("Epsilon" in r["values"] for r in found if r["section"] == "rollout")
    assert [r["values"]["trajectories"] for r in found if r["section"] == "buffer"] == [8, 16], "of both ranks, once"
    assert len([r for r in found if r["section"] == "test"]) == 1


def test_ranks_leave_their_group_before_the_interpreter_ends(directory):
    """Otherwise PyTorch's threads for it may abort a process that is done."""
    assert [(directory / f"left-{rank}").read_text() for rank in (0, 1)] == ["True", "True"]


def test_ranks_read_the_same_published_weights(directory):
    """The second rank may look before the first has written, and has other weights until then."""
    before, after = loaded(directory, "normal")[0], loaded(directory, "published")
    assert not tiny.differing(before, after[0])
    assert not tiny.differing(before, after[1])


def test_a_run_resumes_with_more_ranks_and_with_fewer(directory, lives):
    assert lives[0]["one-two-one"] == lives[1]["one-two-one"] == [2, 24 + 48, 4]
    e = tiny.started(directory, name="one-two-one", resume="auto", ckpt_interval=1, epochs=3)
    assert (e.epoch, e.env_steps, e.learner.grad_steps) == (2, 72, 4)
    e.learn()
    assert (e.epoch, e.env_steps, e.learner.grad_steps) == (3, 96, 6)


def test_a_resumed_run_of_two_ranks_repeats_what_it_would_have_done(directory):
    straight, halved = loaded(directory, "straight"), loaded(directory, "halved")
    assert not tiny.differing(straight[0], halved[0])
    assert not tiny.differing(straight[1], halved[1])


def test_gradients_of_an_unfinished_update_of_two_ranks_are_kept(directory):
    """Of two batches, one was before the stop. Its gradients differ between the ranks, and a state has one set: their mean."""
    (straight, _), (halved, other) = loaded(directory, "straight-2"), loaded(directory, "halved-2")
    assert_equal(straight, halved, 1e-4)
    assert not tiny.differing(halved, other)


def test_ranks_that_wait_for_data_begin_together(lives):
    assert [life["fed"] for life in lives] == [2, 2]


@pytest.mark.parametrize("name", rank_programs.STOPS)
def test_a_signal_to_any_rank_stops_all(directory, lives, name):
    signals = rank_programs.STOPS[name][1]
    ends = [life[name] for life in lives]
    assert [e["code"] for e in ends] == [128 + max(signals.values())] * 2
    assert ends[0]["progress"][3] < 4 * rank_programs.PHASE, "no rank collects to the end"
    assert logged(directory / name, "val") == [], "or evaluates"
    assert ends[0]["progress"] == ends[1]["progress"]
    assert ends[0]["weights"] == ends[1]["weights"]
    newest = checkpoint.newest_complete(directory / name / "ckpts" / "training_states")
    state = checkpoint.load_training_state(newest)[2]
    assert len(state["ranks"]) == 2
    assert [state["epoch"], state["collected"], state["trained"]] == ends[0]["progress"][:3]
    assert sum(state["frames_by_env"].values()) == ends[0]["progress"][3]


def test_a_signal_to_the_launcher_stops_all_ranks(tmp_path):
    launched = Launched("endless", tmp_path)
    try:
        launched.wait_for(lambda: len(logged(tmp_path / "endless", "train")) > 5)
        launched.process.terminate()
        launched.ended()
        assert launched.codes == ["143", "143"]
    finally:
        launched.close()
    e = tiny.started(tmp_path, name="endless", resume="auto", epochs=10**6)
    assert e.learner.grad_steps == logged(tmp_path / "endless", "train")[-1]["grad_steps"] > 0


def logged(run, section):
    return rows(run, section) if (run / "metrics.jsonl").is_file() else []


def test_one_process_never_communicates(tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise AssertionError("one process talks to others")

    for name in ("all_reduce", "broadcast", "barrier", "all_gather_object", "TCPStore"):
        monkeypatch.setattr(torch.distributed, name, refused)
    e = tiny.learned(tmp_path, val_interval=1, val_episodes=2, ckpt_interval=1, batches_per_update=2, train_batches_per_epoch=3)
    e.evaluate_test(tiny.tmaze, timesteps=7)
    assert e.learner.grad_steps == 1
