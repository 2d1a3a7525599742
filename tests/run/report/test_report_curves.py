"""Statistics of runs against slow, independent versions."""

import numpy as np
import pytest
from runs_on_disk import append, phases, row, write_run, write_settings

from amago.run.report import curves
from amago.run.report.log import Log
from amago.run.report.runs import Group, Run, read_run


def trimmed(values):
    """The mean of the middle half, one number at a time."""
    kept = sorted(values)[len(values) // 4 : len(values) - len(values) // 4]
    return sum(kept) / len(kept)


@pytest.mark.parametrize("runs", [1, 2, 3, 4, 7, 8, 20])
def test_the_interquartile_mean_leaves_out_a_quarter_on_both_sides(runs):
    values = np.random.default_rng(runs).standard_cauchy((runs, 5))
    assert curves.interquartile_mean(values) == pytest.approx([trimmed(column) for column in values.T])


@pytest.mark.parametrize("name", ["mean", "IQM"])
def test_bootstrap_intervals_are_those_of_a_loop(name):
    values = np.random.default_rng(1).normal(5.0, 2.0, (6, 3))
    statistic = {"mean": np.mean, "IQM": trimmed}[name]
    rng = np.random.default_rng(123)
    drawn = [[statistic(rng.choice(column, len(column))) for column in values.T] for _ in range(4_000)]
    low, high = curves.interval(values, curves.STATISTICS[name])
    expected = np.quantile(drawn, [0.025, 0.975], axis=0)
    spread = expected[1] - expected[0]
    assert (np.abs(low - expected[0]) < 0.1 * spread).all()
    assert (np.abs(high - expected[1]) < 0.1 * spread).all()


def test_intervals_of_the_mean_do_not_depend_on_how_they_are_computed():
    values = np.random.default_rng(2).normal(size=(5, 4))
    slow = curves.interval(values, lambda v, axis=0: v.mean(axis=axis))
    assert np.allclose(curves.interval(values), slow)


def test_a_bootstrap_interval_has_the_width_of_the_standard_error():
    values = np.random.default_rng(0).normal(5.0, 2.0, (50, 3))
    low, high = curves.interval(values)
    error = values.std(axis=0) / np.sqrt(50)
    assert np.allclose((high - low) / (2 * 1.96 * error), 1.0, atol=0.15)
    assert ((low < values.mean(0)) & (values.mean(0) < high)).all()


def test_curves_of_different_lengths_are_summed_up_where_all_have_values():
    a = curves.Curve(np.array([0.0, 10.0, 20.0]), np.array([0.0, 1.0, 2.0]))
    b = curves.Curve(np.array([5.0, 10.0, 30.0]), np.array([1.0, 2.0, 6.0]))
    both = curves.aggregate([a, b])
    assert (both.x[0], both.x[-1], both.runs) == (5.0, 20.0, 2)
    assert both.y[0] == pytest.approx((0.5 + 1.0) / 2)
    assert both.y[-1] == pytest.approx((2.0 + 4.0) / 2)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["Average Attempt 0 Success in a", "Average Attempt 10 Success in a"], {"Average Attempt # Success in a": [0, 10]}),
        (["Average Trial 1 Return in b", "Average Trial 0 Return in b"], {"Average Trial # Return in b": [0, 1]}),
        (["Average Step 100 Return in c", "Average Step 5 Return in c"], {"Average Step # Return in c": [5, 100]}),
        (["Average Attempt 0 Success in a", "Average Success in a 3"], {}),
    ],
)
def test_scores_by_attempt_are_found_by_their_numbers(names, found):
    assert {title: list(attempts) for title, attempts in curves.by_attempt(names).items()} == found


def test_final_scores_are_means_of_the_last_fifth_of_updates(tmp_path):
    runs = [read_run(write_run(tmp_path / f"r{i}", range(11), attempts=(0.5 * i, 1.0))) for i in range(2)]
    score = "Average Total Return (Across All Env Names)"
    # evaluations at 0, 10, ..., 100 updates: 80, 90 and 100 count
    assert curves.late_mean(runs[0], "val", score) == 9
    both = curves.final_scores(
        Group("g", runs), "val", {0: "Average Attempt 0 Success in lake", 1: "Average Attempt 1 Success in lake"}
    )
    assert both.y.tolist() == [0.25, 1.0]
    assert (both.low[0], both.high[0]) == (0.0, 0.5)
    assert both.low[1] == both.high[1] == 1.0


def test_rates_are_those_of_the_newest_part(tmp_path):
    for epoch in range(80):  # ten times as fast from the middle on
        seconds = 30.0 * min(epoch, 20) + 3.0 * max(0, epoch - 20)
        append(tmp_path / "r", row("rollout", {}, epoch, 100 * epoch, 10 * epoch, seconds))
    run = read_run(tmp_path / "r")
    assert curves.recent_rate(run, "env_steps") == pytest.approx(100 / 3)
    assert curves.rates(run)["updates/s"] == pytest.approx(790 / (600 + 177))
    speed = curves.rate_curve(run, "grad_steps", points=100)
    assert speed.y[0] == pytest.approx(1 / 3)
    assert speed.y[-1] == pytest.approx(10 / 3)


def test_nothing_is_said_of_an_empty_run(tmp_path):
    run = Run(tmp_path, Log())
    assert curves.rates(run) == {}
    assert curves.recent_rate(run, "epoch") is None
    assert curves.rate_curve(run, "grad_steps") is None
    assert curves.last_return(run) is None
    assert curves.late_mean(run, "val", "x") is None


def test_the_newest_return_is_that_of_tests_if_there_are_any(tmp_path):
    append(tmp_path / "r", *phases(0, 5))
    assert curves.last_return(read_run(tmp_path / "r")) == (5.0, "val")
    append(tmp_path / "r", row("test", {"Average Total Return (Across All Env Names)": 7}))
    assert curves.last_return(read_run(tmp_path / "r")) == (7.0, "test")


def test_phases_that_take_turns_make_no_waves_in_rates(tmp_path):
    append(tmp_path / "r", *(r for epoch in range(30) for r in phases(epoch, 1)))
    run = read_run(tmp_path / "r")
    assert curves.rate_curve(run, "env_steps").y == pytest.approx(100 / 30)
    assert curves.rate_curve(run, "grad_steps", points=7).y == pytest.approx(10 / 30)


def test_evaluations_in_some_epochs_make_no_waves_in_rates(tmp_path):
    """The first row of an epoch is before its collection where it evaluates, and after it where it does not."""
    append(tmp_path / "r", *(r for epoch in range(30) for r in phases(epoch, 1)[0 if epoch % 3 == 0 else 1 :]))
    append(tmp_path / "r", row("test", {}, 30, 3000, 300, 930.0))
    run = read_run(tmp_path / "r")
    assert curves.rate_curve(run, "env_steps").y == pytest.approx(100 / 30)
    assert curves.rate_curve(run, "grad_steps").y == pytest.approx(10 / 30)


def test_values_have_the_unit_of_returns(tmp_path):
    append(tmp_path / "r", *phases(0, 1, train={"Q(s, a) (gamma=0.9)": 50.0, "Critic Loss": 50.0}))
    assert curves.series(read_run(tmp_path / "r"), "train", "Q(s, a) (gamma=0.9)", "env_steps").y == [50]
    write_settings(tmp_path / "r", parameters={"amago.agent.Agent.reward_multiplier": 10.0})
    run = read_run(tmp_path / "r")
    assert curves.series(run, "train", "Q(s, a) (gamma=0.9)", "env_steps").y == [5]
    assert curves.series(run, "train", "Critic Loss", "env_steps").y == [50]
