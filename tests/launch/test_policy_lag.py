"""Policies of collectors that are behind the newest published one, which a bound keeps from acting."""

import pytest
from launching import FOREVER, stop
from run_inside import refusal

RUN = {"collectors": 1, "epochs": FOREVER, "train_timesteps_per_epoch": 60}
PHASE = 120  # steps of both actors


def fall_behind(run, versions):
    """Hold the collector, which has read a policy, at the begin of a phase until there are so many newer versions; returns the phase's index."""
    run.until(lambda: run.phases() and run.rows("train"))
    (run.root / "hold-phase").touch()
    run.until(lambda: (run.root / "holds-phase").exists())
    index, newest = len(run.phases()), run.beat("learner")["version"] + versions  # its beat may be a version behind
    run.until(lambda: run.beat("orders").get("version", 0) >= newest)
    (run.root / "hold-phase").unlink()
    run.until(lambda: len(run.phases()) > index)
    return index


def test_with_a_bound_a_phase_ends_when_the_policy_is_too_old(launch):
    run = launch("--max-policy-lag", "2", "--updates-per-step", ":", "--hang-timeout", "600", **RUN)
    index = fall_behind(run, 5)
    run.until(lambda: len(run.phases()) > index + 2)
    stop(run)
    done = run.phases()
    assert done[0] == PHASE, "the first version is the newest until there is data to learn from"
    assert done[index] < PHASE
    assert run.rollouts == run.arrived[0], "what the ended phases have collected is kept"


@pytest.mark.parametrize("value", ["-1", "1.5", "many"])
def test_another_bound_is_refused(value, capsys):
    said = refusal(capsys, "launch", "--collectors", "1", f"--max-policy-lag={value}", "train.py")
    assert f"'{value}' is not a number of versions" in said
