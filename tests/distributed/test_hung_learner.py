"""A learner that hangs is started again if its program resumes; one that saves for long is left alone."""

import signal
import time

import pytest

from amago.distributed.children import Patience
from amago.distributed.hung import HungLearner, LearnerError

FOREVER = 100_000
RUN = {"collectors": 1, "epochs": FOREVER, "train_batches_per_epoch": 2, "ckpt_interval": 1, "keep_training_states": 3}


def updates(run):
    return max((row["grad_steps"] for row in run.rows("train")), default=0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("order", ["hang-learner", "hold-learner"])
def test_a_learner_that_hangs_is_started_again_and_goes_on(launch, order):
    run = launch("--hang-timeout", "5", resume="auto", **RUN)
    run.until(lambda: updates(run) > 6)
    before = run.children
    (run.root / order).touch()
    run.until(lambda: not (run.root / order).exists())
    done = updates(run)
    run.until(lambda: run.children.get("learner") not in (None, before["learner"]))
    run.until(lambda: updates(run) > done + 6)
    assert run.children["collector-0"] == before["collector-0"], "collectors go on"
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    assert "has said nothing for 5 seconds and was killed; it starts again from its last training state" in run.output
    steps = [row["env_steps"] for row in run.rows("buffer")]
    assert steps[-1] == max(steps)


@pytest.mark.timeout(600)
def test_a_learner_that_hangs_and_does_not_resume_ends_the_launch(launch):
    run = launch("--hang-timeout", "4", **RUN)
    run.until(lambda: updates(run) > 2)
    (run.root / "hang-learner").touch()
    assert run.wait() == 1
    assert "give the experiment resume='auto'" in run.output


@pytest.mark.timeout(600)
def test_a_learner_that_saves_for_long_is_left_alone(launch):
    run = launch("--hang-timeout", "3", resume="auto", **RUN)
    run.until(lambda: updates(run) > 2)
    before = run.children["learner"]
    (run.root / "save-slowly").write_text("8")
    run.until(lambda: (run.root / "saved-slowly").exists())
    assert run.beat("learner")["state"] == "saving"
    (run.root / "save-slowly").unlink()
    done = updates(run)
    run.until(lambda: updates(run) > done)
    assert run.children["learner"] == before
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    assert "was killed" not in run.output


class Learner:
    """A child that says what a test lets it say."""

    def __init__(self):
        self.beat, self.heard, self.runs, self.starts = {}, time.monotonic(), True, 0

    def listen(self):
        pass

    def kill(self):
        self.runs = False

    def start(self):
        self.beat, self.heard, self.runs, self.starts = {}, time.monotonic(), True, self.starts + 1

    def says(self, silent, **beat):
        self.beat, self.heard = {"resumes": True, "silence": "short", "state": "training", **beat}, time.monotonic() - silent


PATIENCE = Patience(start=100, step=10, deaths=3)


def test_hangs_in_a_row_are_counted_until_there_is_an_update():
    child = Learner()
    guard = HungLearner(child, PATIENCE)
    for number in (50, 60, 60):
        child.says(11, updates=number)
        guard.watch()
    assert child.starts == 3
    assert len(guard.news) == 3
    child.says(11, updates=60)
    with pytest.raises(LearnerError, match="3 times in a row without an update"):
        guard.watch()
    assert child.starts == 3


@pytest.mark.parametrize(
    ("silence", "seconds", "hangs"),
    [("short", 9, False), ("short", 11, True), ("long", 99, False), ("long", 101, True), (None, 1e6, False)],
)
def test_how_long_it_may_be_silent_depends_on_what_it_does(silence, seconds, hangs):
    child = Learner()
    child.says(seconds, silence=silence)
    HungLearner(child, PATIENCE).watch()
    assert child.starts == hangs


def test_a_start_may_take_as_long_as_it_likes_unless_it_is_another_one():
    child = Learner()
    guard = HungLearner(child, PATIENCE)
    child.heard -= 1e6
    guard.watch()
    assert child.starts == 0
    child.says(11, updates=5)
    guard.watch()
    assert child.starts == 1
    child.heard -= 101
    guard.watch()
    assert child.starts == 2, "the second start was too long, and there is a third"
    child.heard -= 101
    with pytest.raises(LearnerError, match="3 times in a row"):
        guard.watch()
