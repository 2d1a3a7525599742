"""Policies of collectors that are behind the newest published one: reported, and with a bound not acted with."""

import pytest
from launching import stop

from amago.launch.progress import LARGE_LAG

FOREVER = 100_000
RUN = {"collectors": 1, "epochs": FOREVER, "train_timesteps_per_epoch": 60}
PHASE = 120  # steps of both actors


def largest_lag(run):
    return max((row["values"].get("Largest Policy Lag (Versions)", 0) for row in run.rows("rollout")), default=0)


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


def test_without_a_bound_phases_are_whole_and_the_lag_is_said_once(launch):
    run = launch("--updates-per-step", ":", "--hang-timeout", "600", **RUN)
    fall_behind(run, LARGE_LAG + 12)
    run.until(lambda: largest_lag(run) >= LARGE_LAG + 10)
    stop(run)
    assert set(run.phases()[:-1]) == {PHASE}
    assert run.output.count("collector-0 acts with policy") == 1


def test_with_a_bound_a_phase_ends_when_the_policy_is_too_old(launch):
    run = launch("--max-policy-lag", "2", "--updates-per-step", ":", "--hang-timeout", "600", **RUN)
    index = fall_behind(run, 5)
    run.until(lambda: len(run.phases()) > index + 2)
    stop(run)
    done = run.phases()
    assert done[0] == PHASE, "the first version is the newest until there is data to learn from"
    assert done[index] < PHASE
    assert "collector-0 acts with policy" not in run.output, "there is nothing to say of what is bounded"
    assert run.rollouts == run.arrived[0], "what the ended phases have collected is kept"


@pytest.mark.parametrize("value", ["-1", "1.5", "many"])
def test_another_bound_is_refused(value, capsys):
    from amago.cli import main

    with pytest.raises(SystemExit):
        main(["launch", "--collectors", "1", f"--max-policy-lag={value}", "train.py"])
    assert f"'{value}' is not a number of versions" in capsys.readouterr().err
