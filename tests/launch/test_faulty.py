"""Launches in which something fails for good: they end with a reason, or train on."""

import os
import sys

import pytest
from fault_helpers import count
from launching import FOREVER, RUN, changed, stop

RAISES = """
def step(self, action):
    raise ValueError("the motor is not connected")
launched_program.Slow.step = step
"""
NEVER_STARTS = """
if role == "collector":
    raise SystemExit("no display is there")
"""
READ_ONLY = """
import amago.run.launched.protocol as module
def write_small(path, value, real=module.write_small):
    if {condition}:
        raise PermissionError(13, "Permission denied", str(path))
    real(path, value)
module.write_small = write_small
"""
NO_OUTBOX = READ_ONLY.format(condition='"outbox" in str(path)')
NO_STATUS = READ_ONLY.format(
    condition='path.name in ("learner.json", "collector-0.json") and os.path.exists(sys.argv[1] + "/readonly")'
)


IMPATIENT = (
    "import sys; from amago.launch import processes; processes.FAILURES = 2; from amago.cli import main; sys.exit(main())"
)
FAULTS = [(RAISES, "the motor is not connected"), (NEVER_STARTS, "no display is there"), (NO_OUTBOX, "Permission denied")]


@pytest.mark.parametrize(("change", "reason"), FAULTS[: count(1, 3)])
def test_collectors_that_never_deliver_end_the_launch_with_the_end_of_their_log(launch, tmp_path, change, reason):
    run = launch(cli=("-c", IMPATIENT), collectors=1, program=changed(tmp_path, change), epochs=FOREVER)
    assert run.wait() == 1, run.output
    assert "2 times in a row without a delivered phase" in run.output
    assert reason in run.output
    assert run.output.count("it is replaced in") == 1


def test_a_status_that_cannot_be_written_never_stops_training(launch, tmp_path):
    # without limits: a request to pause that is the last to be written would stay
    run = launch("--updates-per-step", ":", collectors=1, program=changed(tmp_path, NO_STATUS), **RUN)
    run.until(lambda: len(run.rows("train")) > 3)
    (tmp_path / "readonly").touch()
    done, before = len(run.rows("train")), run.children
    run.until(lambda: len(run.rows("train")) > done + 10)
    assert run.children == before
    stop(run)


def test_a_folder_amago_in_the_current_directory_is_not_looked_into(tmp_path, monkeypatch):
    from amago.launch import launch

    (tmp_path / "amago").mkdir()
    (tmp_path / "amago" / "__init__.py").write_text("raise SystemExit('the wrong amago')")
    (tmp_path / "train.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([p for p in sys.path if p]))
    assert launch("train.py", collectors=1) == 3
