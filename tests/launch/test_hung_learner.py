"""A learner that hangs is started again if its program resumes; one that saves for long is left alone."""

import os
import signal
import time

import pytest
from launching import stop, updates

from amago.launch.children import LaunchError, Patience, Role
from amago.run.launched.protocol import Assignment

FOREVER = 100_000
RUN = {"collectors": 1, "epochs": FOREVER, "train_batches_per_epoch": 2, "ckpt_interval": 1, "keep_training_states": 3}


def test_a_learner_that_hangs_is_started_again_and_goes_on(launch):
    """One that lets no other thread run; `test_launch_ranks` has one that sleeps."""
    run = launch("--hang-timeout", "20", resume="auto", **RUN)
    run.until(lambda: updates(run) > 6)
    before = run.children
    (run.root / "hold-learner").touch()
    run.until(lambda: not (run.root / "hold-learner").exists())
    done = updates(run)
    run.until(lambda: run.children.get("learner") not in (None, before["learner"]))
    run.until(lambda: updates(run) > done + 6)
    assert run.children["collector-0"] == before["collector-0"], "collectors go on"
    stop(run)
    assert "it starts again from its last training state" in run.output
    steps = [row["env_steps"] for row in run.rows("buffer")]
    assert steps[-1] == max(steps)


def test_a_learner_that_saves_says_so_and_is_left_alone(launch):
    """`test_a_long_silence_is_a_hang_where_a_short_one_was_announced` has the time that it is given."""
    run = launch(resume="auto", **RUN)
    (run.root / "hold-save").touch()
    run.until(lambda: (run.root / "holds-save").exists())
    run.until(lambda: run.beat("learner").get("state") == "saving")
    assert run.beat("learner")["silence"] == "long"
    before, done = run.children["learner"], updates(run)
    (run.root / "hold-save").unlink()
    run.until(lambda: updates(run) > done)
    assert run.children["learner"] == before
    stop(run)
    assert "was killed" not in run.output


class Rank:
    """A learner's process, which gives the signs of life that a test lets it give."""

    assignment, log = Assignment("learner", 0, 1, ""), None

    def __init__(self):
        self.beat, self.beat_time, self.code, self.process, self.starts = {}, time.monotonic(), None, self, 0

    @property
    def runs(self):
        return self.process is not None

    def read_beat(self):
        pass

    def end_of_log(self):
        return ""

    def kill(self):
        pass

    def start(self):
        self.beat, self.beat_time, self.code, self.process, self.starts = {}, time.monotonic(), None, self, self.starts + 1

    def gives(self, silent, **beat):
        self.beat, self.beat_time = (
            {"resumes": True, "silence": "short", "state": "training", **beat},
            time.monotonic() - silent,
        )


def learner():
    rank = Rank()
    return rank, Role([rank], Patience(start=100, step=10, failures=3, first=0.0), "an update", [])


def test_failures_in_a_row_are_counted_until_there_is_an_update():
    """Deaths and hangs alike."""
    rank, role = learner()
    for number, code in ((50, None), (60, -9), (60, None)):
        rank.gives(11, updates=number)
        rank.code = code
        assert role.watch(number)
        assert role.watch(number)
    assert rank.starts == 3
    assert "ended by SIGKILL, perhaps because memory ran out; it starts again" in role.news[1]
    rank.gives(11, updates=60)
    with pytest.raises(LaunchError, match="3 times in a row without an update"):
        role.watch(60)
    assert rank.starts == 3


def test_a_long_silence_is_a_hang_where_a_short_one_was_announced():
    rank, role = learner()
    for silent, announced, hangs in (
        (11, "long", False),
        (11, None, False),
        (10**6, None, False),
        (9, "short", False),
        (11, "short", True),
        (101, "long", True),
    ):
        rank.gives(silent, silence=announced)
        assert role.watch(0)
        assert (rank.process is None) == hangs
        rank.start()


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_learner_that_is_killed_starts_again_where_it_resumes(launch, resume):
    run = launch(**RUN, resume=resume)
    run.until(lambda: updates(run) > 6)
    done, before = updates(run), run.children["learner"]
    os.kill(before, signal.SIGKILL)
    if resume == "never":
        assert run.wait() == 1
        assert "the learner was ended by SIGKILL, perhaps because memory ran out. It is not started again" in run.output
        assert "give the experiment resume='auto'" in run.output
        return
    run.until(lambda: updates(run) > done + 6)
    stop(run)
    assert "the learner was ended by SIGKILL, perhaps because memory ran out; it starts again" in run.output
