"""The progress line of a launch."""

from amago.distributed.progress import Rates, progress_line
from amago.run.roles.limits import UpdateLimits

LEARNER = {"state": "training", "epoch": 3, "epochs": 20, "updates": 1500, "steps": 60_000, "version": 4}


def test_it_says_what_each_role_does_how_fast_the_ratio_and_the_lag():
    collectors = [{"state": "collecting", "version": 4}, {"state": "collecting", "paused": "paused", "version": 2}, {}]
    line = progress_line(LEARNER, collectors, (12.5, 2000.0), UpdateLimits(0.01, 0.05), replaced=1)
    assert line == (
        "learner training, epoch 3/20, 1,500 updates (12.5/s) | collectors: 1 collecting, 1 paused, 1 starting, 1 replaced; "
        "60,000 steps (2,000/s) | 0.025 updates/step in 0.01:0.05 | policy 4, lag 2"
    )


def test_before_the_first_step_there_is_no_ratio():
    line = progress_line({**LEARNER, "steps": 0}, [], (0.0, 0.0), UpdateLimits())
    assert "updates/step" not in line
    assert "lag" not in line


def test_before_the_learner_has_said_anything():
    assert progress_line({}, [], (0.0, 0.0), UpdateLimits()) == "learner starting"


def test_rates_are_those_of_the_last_seconds():
    rates = Rates(window=10)
    assert rates.add(0, 0, 0) == (0.0, 0.0)
    assert rates.add(10, 100, 1000) == (10.0, 100.0)
    assert rates.add(20, 100, 1000) == (0.0, 0.0)


def test_rates_begin_anew_when_the_learner_goes_back():
    rates = Rates()
    rates.add(0, 100, 1000)
    assert rates.add(1, 50, 1000) == (0.0, 0.0)
    assert rates.add(2, 60, 1100) == (10.0, 100.0)


def test_what_collectors_wait_for_and_what_is_not_delivered_is_said():
    collectors = [{"state": "collecting", "version": 2, "paused": why} for why in ("waiting for disk space", "paused")]
    collectors.append({"state": "collecting", "version": 1, "paused": "waiting for a newer policy"})
    line = progress_line({**LEARNER, "version": 0}, collectors, (0.0, 0.0), UpdateLimits(), newest=9, waiting=12_345_678)
    assert "collectors: 1 paused, 1 waiting for a newer policy, 1 waiting for disk space;" in line
    assert line.endswith("policy 9, lag 8 | 12 MB not delivered")
