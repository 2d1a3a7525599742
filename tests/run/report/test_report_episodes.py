"""Rewards by time in the rollout, from the buffer of a run that was really trained."""

import json

import numpy as np
import pytest
import tiny
from report_pages import cells_of, figures_of, lines, shown, text_of

from amago.run.report.episodes import buffer_of, by_time, rewards_by_time
from amago.run.report.page import write_report
from amago.run.report.runs import Group, read_run
from amago.store import TrajectoryStore


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two epochs, with its buffer."""
    root = tmp_path_factory.mktemp("trained")
    experiment = tiny.started(root, epochs=2, val_interval=1)
    experiment.learn()
    experiment.close()
    return experiment.run_dir


def test_rewards_are_those_of_the_buffer(trained):
    before = sorted((p, p.stat().st_mtime_ns) for p in trained.rglob("*") if p.is_file())
    found = rewards_by_time(read_run(trained))
    store = TrajectoryStore(buffer_of(read_run(trained)), edit=False)
    store.refresh()
    trajectories = [store.read(i) for i in range(len(store))]
    assert trajectories
    assert set(found) == {"TMaze"}
    times, rewards = found["TMaze"]
    for t, mean in zip(times, np.nanmean(rewards, axis=0)):
        own = [traj.rews[int(t) - traj.start_time, 0] for traj in trajectories if 0 <= t - traj.start_time < len(traj)]
        assert mean == pytest.approx(np.mean(own))
    assert sorted((p, p.stat().st_mtime_ns) for p in trained.rglob("*") if p.is_file()) == before  # only read


def test_long_rollouts_are_summed_up_in_spans(tmp_path):
    parts = [(np.arange(0.0, 100.0, 5.0), np.tile(np.arange(20.0), (4, 1)))]
    curve = by_time(Group("g", []), parts)
    assert curve.y.tolist() == list(range(20))
    assert np.allclose(curve.low, curve.y)
    short = (np.arange(0.0, 50.0, 5.0), np.tile(np.arange(10.0) + 2, (4, 1)))
    both = by_time(Group("g", []), [*parts, short])
    assert both.x.tolist() == short[0].tolist()
    assert both.y.tolist() == (np.arange(10.0) + 1).tolist()
    assert both.runs == 2


def test_what_only_some_rollouts_reach_is_their_mean():
    values = np.array([[1.0, np.nan], [3.0, 5.0], [2.0, 7.0], [2.0, 6.0]])
    curve = by_time(Group("g", []), [(np.array([0.0, 1.0]), values)])
    assert curve.y.tolist() == [2.0, 6.0]
    assert (curve.low < curve.y).all()
    assert (curve.y < curve.high).all()


def test_a_report_of_a_real_run(trained, tmp_path):
    page = write_report([trained], tmp_path / "page.html")
    found = figures_of(page)
    for title in (
        "Mean return, evaluation",
        "Reward by time in the rollout: TMaze",
        "Values and returns",
        "Critic Loss",
        "Gradient Norm",
    ):
        assert shown(found[title]), title
    assert lines(found["Critic Loss"], axis="grad_steps")
    assert cells_of(page, "runs", trained.name)["updates"] != "0"
    assert "cannot be read" not in text_of(page)
    json.loads(json.dumps(found), parse_constant=pytest.fail)  # no NaN, which browsers refuse


def test_a_buffer_that_cannot_be_read_is_named(trained, tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise OSError("disk on fire")

    monkeypatch.setattr("amago.run.report.episodes.TrajectoryStore", refuse)
    assert "disk on fire" in text_of(write_report([trained], tmp_path / "page.html"))
