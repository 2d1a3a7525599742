"""Launches with several learners, and programs that call the parts of `start()` themselves."""

import os
import signal
import time
from pathlib import Path

import pytest
from launching import assert_gone, family, stop, updates

from amago.run import checkpoint

FOREVER = 100_000
PARTS = Path(__file__).with_name("launched_in_parts.py")
RUN = {"epochs": FOREVER, "train_batches_per_epoch": 2, "ckpt_interval": FOREVER, "resume": "auto"}


def test_two_learners_and_two_collectors_train_stop_and_resume(launch):
    run = launch("--learners", "2", "--updates-per-step", ":0.05", collectors=2, **RUN)
    run.until(lambda: updates(run) > 4 and len(run.ranks) == 2)
    assert run.children.keys() == {"learner", "collector-0", "collector-1"}
    everyone = family(run.process.pid)
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


@pytest.mark.parametrize(("rank", "waits_for"), [(0, "steps"), (1, "data")])
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


def test_a_killed_launcher_leaves_no_rank_behind(launch):
    """Also not ranks that are importing."""
    run = launch("--learners", "2", collectors=1, **RUN)
    run.until(lambda: len(run.ranks) == 2)
    everyone = family(run.process.pid)
    run.process.kill()
    run.process.communicate()
    assert_gone(everyone)


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


def test_a_loop_of_the_program_s_own_is_refused(launch):
    run = launch(program=PARTS, words=["loop"], collectors=1)
    assert run.wait() == 1
    assert "a launched program calls learn()" in run.output
    assert "collect_new_training_data() before it is a loop" in run.output


def test_when_one_of_two_learners_hangs_both_are_started_again(launch):
    run = launch(
        "--learners", "2", "--hang-timeout", "20", collectors=1, **RUN | {"ckpt_interval": 1, "keep_training_states": 3}
    )
    run.until(lambda: updates(run) > 6 and len(run.ranks) == 2)
    before = run.ranks
    (run.root / "hang-learner").touch()
    run.until(lambda: not (run.root / "hang-learner").exists())
    done = updates(run)
    run.until(lambda: len(run.ranks) == 2 and not set(before.values()) & set(run.ranks.values()))
    assert_gone(before.values())
    run.until(lambda: updates(run) > done + 2)
    stop(run)
    assert "it starts again from its last training state" in run.output
