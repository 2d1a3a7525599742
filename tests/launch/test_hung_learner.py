"""A learner that hangs is started again if its program resumes; one that saves for long is left alone."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
from fault_helpers import assert_gone, count
from launching import FOREVER, stop, updates

from amago.launch import processes
from amago.launch.processes import LaunchError, Role
from amago.run.launched.protocol import Assignment

RUN = {"collectors": 1, "epochs": FOREVER, "train_batches_per_epoch": 2, "ckpt_interval": 1, "keep_training_states": 3}


@pytest.mark.parametrize(("order", "learners"), [("hang-learner", 2), ("hold-learner", 1)][: count(1, 2)])
def test_a_learner_that_hangs_is_started_again_and_goes_on(launch, order, learners):
    """One that lets no other thread run; or one of two that sleeps, with which both are started again."""
    run = launch("--hang-timeout", "20", "--learners", str(learners), resume="auto", **RUN)
    run.until(lambda: updates(run) > 6)
    before, ranks = run.children, run.ranks
    assert len(ranks) == (learners if learners > 1 else 0)
    (run.root / order).touch()
    run.until(lambda: not (run.root / order).exists())
    done = updates(run)
    run.until(lambda: run.children.get("learner") not in (None, before["learner"]))
    assert_gone([before["learner"], *ranks.values()])
    run.until(lambda: updates(run) > done + 6)
    assert run.children["collector-0"] == before["collector-0"], "collectors go on"
    stop(run)
    assert "it starts again from its last training state" in run.output
    steps = [row["env_steps"] for row in run.rows("buffer")]
    assert steps[-1] == max(steps)


class Learner(Role):
    """Gives the signs of life that a test lets it give."""

    def __init__(self, control):
        super().__init__(Assignment("learner", 0, 1, control), [], hang_timeout=10)
        self.starts = 0

    def start(self):
        self.processes = [SimpleNamespace(poll=lambda: None)]
        self.starts, self._silent_since = self.starts + 1, time.monotonic()

    def read_beat(self):
        pass

    def kill(self):
        pass

    def gives(self, silent, code=None, **beat):
        self.beat = {"resumes": True, "long": False, "state": "training", **beat}
        self._silent_since, self.processes[0].poll = time.monotonic() - silent, lambda: code


@pytest.fixture
def learner(tmp_path, monkeypatch):
    for name, value in {"START_SECONDS": 100.0, "FAILURES": 3, "FIRST_PAUSE": 0.0}.items():
        monkeypatch.setattr(processes, name, value)
    role = Learner(str(tmp_path))
    assert role.watch(0)
    return role


def test_failures_in_a_row_are_counted_until_there_is_an_update(learner, capsys):
    """Deaths and hangs alike."""
    for number, code in ((50, None), (60, -9), (60, None)):
        learner.gives(11, code)
        assert learner.watch(number)
        assert learner.watch(number)
    assert learner.starts == 4
    assert "ended by SIGKILL, perhaps because memory ran out; it starts again" in capsys.readouterr().err
    learner.gives(11)
    with pytest.raises(LaunchError, match="3 times in a row without an update"):
        learner.watch(60)
    assert learner.starts == 4


@pytest.mark.parametrize(
    ("silent", "beat", "hangs"),
    [(9, {}, False), (11, {}, True), (11, {"long": True}, False), (101, {"long": True}, True), (10**6, {"over": True}, False)],
)
def test_a_long_silence_is_a_hang_unless_it_was_announced(learner, silent, beat, hangs, capsys):
    learner.gives(silent, **beat)
    assert learner.watch(0)
    assert ("was killed" in capsys.readouterr().err) == hangs


def test_a_learner_that_saves_is_left_alone_and_one_that_is_killed_starts_again(launch):
    """`test_a_long_silence_is_a_hang_unless_it_was_announced` has the time that a save is given."""
    run = launch(**RUN, resume="auto")
    (run.root / "hold-save").touch()
    run.until(lambda: (run.root / "holds-save").exists() and run.beat("learner").get("state") == "saving")
    assert run.beat("learner")["long"]
    before, done = run.children["learner"], updates(run)
    (run.root / "hold-save").unlink()
    run.until(lambda: updates(run) > done + 6)
    assert run.children["learner"] == before
    done = updates(run)
    os.kill(before, signal.SIGKILL)
    run.until(lambda: updates(run) > done + 6)
    stop(run)
    assert "the learner was ended by SIGKILL, perhaps because memory ran out; it starts again" in run.output
    assert "was killed" not in run.output


def test_a_killed_learner_that_does_not_resume_ends_the_launch(launch):
    run = launch(**RUN, resume="never")
    run.until(lambda: updates(run) > 6)
    os.kill(run.children["learner"], signal.SIGKILL)
    assert run.wait() == 1
    assert "the learner was ended by SIGKILL, perhaps because memory ran out. It is not started again" in run.output
    assert "give the experiment resume='auto'" in run.output
