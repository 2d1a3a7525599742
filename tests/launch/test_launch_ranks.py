"""Launches with several learners, and programs that call the parts of `start()` themselves."""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from fault_helpers import assert_gone, count
from launching import RUN, family, stop, updates

from amago.run import checkpoint

PARTS = Path(__file__).with_name("launched_in_parts.py")


def listening(pids):
    """Addresses other than this machine's own on which processes listen."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [c.laddr for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return [address for address in found if address.ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")]


def test_two_learners_and_two_collectors_train_stop_and_resume(launch):
    run = launch("--learners", "2", "--updates-per-step", ":0.05", collectors=2, **RUN)
    run.until(lambda: updates(run) > 4 and len(run.ranks) == 2)
    assert run.children.keys() == {"learner", "collector-0", "collector-1"}
    everyone = family(run.process.pid)
    assert listening(everyone) == []
    stop(run)
    assert_gone(everyone)
    assert all(row["values"].get("Updates per Environment Step", 0) <= 0.05 for row in run.rows("buffer"))
    newest = checkpoint.newest_complete(run.run_dir / "ckpts" / "training_states")
    state = checkpoint.load_training_state(newest)[2]
    assert len(state["ranks"]) == 2
    done = state["updater"]["grad_steps"]
    assert done >= updates(run)
    again = launch("--learners", "2", collectors=2, **RUN)
    again.until(lambda: updates(again) > done + 2)
    stop(again, signal.SIGINT)
    steps = [row["env_steps"] for row in again.rows("buffer")]
    assert steps == sorted(steps), "the count of environment steps goes on"


@pytest.mark.parametrize(("rank", "waits_for"), [(1, "steps"), (1, "data"), (0, "steps")][: count(1, 3)])
def test_a_signal_to_one_rank_while_the_first_waits_ends_all(launch, rank, waits_for):
    """The first rank waits for more steps before the next update, and the other one for the first."""
    fields = {"train_timesteps_per_epoch": 10**6} if waits_for == "data" else {}
    run = launch("--learners", "2", "--updates-per-step", ":1e-9", collectors=1, **RUN | fields)
    run.until(lambda: all((run.root / f"learns-{i}").exists() for i in (0, 1)))  # both ranks handle signals
    run.until(lambda: run.beat("learner").get("state") == "waiting" and run.beat("collector-0").get("steps", 0) > 100)
    if waits_for == "steps":
        run.until(lambda: run.beat("learner").get("steps"))
        time.sleep(2)  # mostly, both are at the batch then; it ends in the same way if they are not
    everyone = family(run.process.pid)
    os.kill(run.ranks[rank], signal.SIGTERM)
    assert run.wait() == 143, run.output
    assert_gone(everyone)
    assert checkpoint.newest_complete(run.run_dir / "ckpts" / "training_states") is not None


def test_a_program_that_calls_the_parts_of_start_is_launched(launch):
    run = launch(
        program=PARTS, collectors=1, epochs=4, train_batches_per_epoch=3, val_interval=2, ckpt_interval=1, resume="auto"
    )
    assert run.wait() == 0, run.output
    assert "learned 12" in run.output
    assert run.rows("val")
    assert run.rollouts == run.arrived[0]
    assert {p.name for p in (run.run_dir / "launch").glob("collector-*")} == {"collector-0"}
    again = launch(program=PARTS, collectors=1, epochs=5, train_batches_per_epoch=3, ckpt_interval=1, resume="auto")
    assert again.wait() == 0, again.output
    assert "learned 15" in again.output


def test_collectors_pause_while_the_program_evaluates_at_the_end(launch, tmp_path):
    (hold := tmp_path / "hold-evaluation").touch()
    run = launch(
        "--updates-per-step", ":", program=PARTS, words=["evaluate"], collectors=1, epochs=2, train_batches_per_epoch=3
    )
    run.until(lambda: (run.root / "holds-evaluation").exists() and run.beat("collector-0").get("paused") == "paused")
    before = run.children
    time.sleep(3)  # in which collectors that end are replaced
    assert run.children == before
    hold.unlink()
    assert run.wait() == 0, run.output
    assert "replaced" not in run.output


def test_a_loop_of_the_program_s_own_is_refused(launch):
    run = launch(program=PARTS, words=["loop"], collectors=1)
    assert run.wait() == 1
    assert "a launched program calls learn()" in run.output
    assert "collect_new_training_data() before it is a loop" in run.output
