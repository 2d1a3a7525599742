"""Policies of collectors that are behind the newest published one: reported, and with a bound not acted with."""

import pytest
import tiny
from launching import stop

from amago.launch.progress import LARGE_LAG

FOREVER = 100_000
PHASE = 800  # steps of each of two actors, of a millisecond: seconds in which the learner publishes many versions


def phases(run):
    """Steps of each of the collector's phases."""
    path = run.run_dir / "launch" / "collector-0"
    steps = [row["env_steps"] for row in tiny.rows(path, "rollout")] if (path / "metrics.jsonl").exists() else []
    return [b - a for a, b in zip([0, *steps], steps)]


def largest_lag(run):
    return max((row["values"]["Largest Policy Lag (Versions)"] for row in run.rows("rollout")), default=0)


def test_without_a_bound_phases_are_whole_and_the_lag_is_said_once(launch):
    run = launch("--updates-per-step", ":", collectors=1, epochs=FOREVER, train_timesteps_per_epoch=PHASE)
    run.until(lambda: len(phases(run)) >= 4 and largest_lag(run) > LARGE_LAG + 10)
    stop(run)
    assert set(phases(run)[:4]) == {2 * PHASE}
    assert run.output.count("collector-0 acts with policy") == 1


def test_with_a_bound_a_phase_ends_when_the_policy_is_too_old(launch):
    run = launch(
        "--max-policy-lag", "2", "--updates-per-step", ":", collectors=1, epochs=FOREVER, train_timesteps_per_epoch=PHASE
    )
    run.until(lambda: len(phases(run)) >= 6)
    stop(run)
    done = phases(run)
    assert done[0] == 2 * PHASE, "the first version is the newest until there is data to learn from"
    assert max(done[2:]) < 2 * PHASE
    assert "collector-0 acts with policy" not in run.output, "there is nothing to say of what is bounded"
    assert run.rollouts == run.arrived[0], "what the ended phases have collected is kept"


@pytest.mark.parametrize("value", ["-1", "1.5", "many"])
def test_another_bound_is_refused(value, capsys):
    from amago.cli import main

    with pytest.raises(SystemExit):
        main(["launch", "--collectors", "1", f"--max-policy-lag={value}", "train.py"])
    assert f"'{value}' is not a number of versions" in capsys.readouterr().err
