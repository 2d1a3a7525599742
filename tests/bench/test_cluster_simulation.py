"""The simulation of a launched run keeps what every launch keeps, and agrees with the closed form where that is exact."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import cluster_model as cm
from benchmarks.cluster_model import Cluster, Constants
from benchmarks.cluster_simulation import Simulation, simulate

FREE = Constants()
COSTLY = Constants(
    call=0.004, move_file=1e-4, copy_file=0.002, copy_rate=3e8, look=0.002, look_file=2e-6, new_file=2e-4, publish=0.01, publish_rate=3e8,
    load=0.005, load_rate=1e9, phase=0.02, epoch=0.03, read_rate=20_000.0,
)  # fmt: skip
seconds = st.floats(min_value=0.002, max_value=0.5)


@st.composite
def clusters(draw, **fixed):
    least = draw(st.sampled_from([0.0, 0.001, 0.02, 0.3]))
    most = draw(st.sampled_from([math.inf, 1.0, 1.5, 4.0]))
    drawn = {
        "collectors": draw(st.integers(1, 12)), "actors": draw(st.integers(1, 8)), "step": draw(seconds), "phase": draw(st.integers(1, 60)),
        "horizon": draw(st.integers(1, 90)), "update": draw(seconds), "epoch": draw(st.integers(1, 50)), "least": least,
        "most": most if math.isinf(most) else max(least, 0.01) * most, "warmup": draw(st.sampled_from([0, 0, 500])),
        "learners": draw(st.integers(1, 4)), "nodes": draw(st.integers(0, 4)), "jitter": draw(st.sampled_from([0.0, 0.2])),
    }  # fmt: skip
    return Cluster(**drawn | fixed)


@settings(max_examples=60, deadline=None)
@given(clusters(), st.sampled_from([FREE, COSTLY]), st.integers(0, 5))
def test_no_step_is_lost_or_counted_twice(cluster, constants, seed):
    run = Simulation(cluster, constants, seed)
    for time in (1.0, 7.3, 30.0):
        run.run_until(time)
        assert run.made == run.unfinished + run.spooled + run.arriving + run.stored
        assert min(run.unfinished, run.spooled, run.arriving, run.stored) >= 0


@settings(max_examples=60, deadline=None)
@given(clusters(), st.sampled_from([FREE, COSTLY]), st.integers(0, 5))
def test_the_limits_are_kept(cluster, constants, seed):
    run = simulate(cluster, constants, 60.0, seed=seed, sample=0.05)
    missing = cm.in_flight(cluster, constants, files=run.files)
    for s in run.samples:
        assert s.updates == 0 or s.stored >= cluster.warmup
        assert cluster.most == math.inf or s.updates <= cluster.most * s.stored
        assert cluster.least * max(0, s.stored - cluster.warmup) <= 1 + s.updates + cluster.least * missing


@settings(max_examples=40, deadline=None)
@given(clusters(learners=1), st.integers(1, 10), st.integers(0, 5))
def test_more_collectors_never_slow_the_learner(cluster, more, seed):
    constants = dataclasses.replace(
        COSTLY, look_file=0.0, new_file=0.0
    )  # more files would take longer to look at, 1/20 at most
    more = dataclasses.replace(cluster, collectors=cluster.collectors + more)
    few, many = (simulate(c, constants, 60.0, since=0.0, seed=seed) for c in (cluster, more))
    assert many.updates * 60 >= 0.95 * few.updates * 60 - 2


def test_a_simulation_repeats():
    cluster = Cluster(5, jitter=0.3, least=0.01, most=0.02, nodes=2)
    first, second, other = (simulate(cluster, COSTLY, 40.0, seed=seed) for seed in (3, 3, 4))
    assert first == second
    assert first.samples != other.samples


REGIMES = {
    "the learner waits": ({"collectors": 2, "most": 0.01, "least": 0.005}, "collectors"),
    "neither waits": ({"collectors": 8, "most": 0.05, "least": 0.001}, "both"),
    "collectors pause": ({"collectors": 40, "most": 0.05, "least": 0.005}, "learner"),
}


@pytest.mark.parametrize("constants", [FREE, COSTLY], ids=["free", "costly"])
@pytest.mark.parametrize("nodes", [0, 3])
@pytest.mark.parametrize("regime", REGIMES)
def test_the_closed_form_agrees_in_the_long_run(regime, nodes, constants):
    fields, limit = REGIMES[regime]
    cluster = Cluster(actors=4, step=0.02, phase=100, horizon=50, update=0.08, epoch=20, nodes=nodes, **fields)
    found, expected = simulate(cluster, constants, 1200.0, since=300.0), cm.predict(cluster, constants)
    assert expected.limit == limit
    for name in ("steps", "updates"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=0.05), name
    assert found.ratio == pytest.approx(expected.ratio, rel=0.05)
    assert found.learner["waiting"] == pytest.approx(expected.learner_waits, abs=0.05)
    assert found.collectors["paused"] == pytest.approx(expected.collectors_pause, abs=0.05)
    assert found.lag_versions == pytest.approx(expected.lag_versions, rel=0.2, abs=0.5)


def test_a_slow_ingest_limits_the_steps():
    slow = dataclasses.replace(FREE, copy_file=0.5)
    cluster = Cluster(20, actors=4, step=0.02, phase=100, horizon=100, update=0.05, nodes=4)
    found = simulate(cluster, slow, 2400.0)
    assert cm.predict(cluster, slow).limit == "ingest"
    assert found.steps == pytest.approx(cm.ingest_rate(cluster, slow), rel=0.05)
    assert found.spool > 10 * cm.file_steps(cluster)
    assert min(cm.saturation(cluster, slow).items(), key=lambda x: x[1])[0] in ("learner", "ingest")


def test_a_slow_network_ages_the_weights_and_nothing_else():
    cluster = Cluster(8, nodes=4, weights=1e8, epoch=20)
    fast, slow = (simulate(dataclasses.replace(cluster, network=n), FREE, 300.0) for n in (1e10, 2e8))
    assert slow.lag_seconds > fast.lag_seconds + 0.5
    assert slow.updates == pytest.approx(fast.updates, rel=0.02)


def test_ranks_wait_for_the_slowest():
    one, eight = (simulate(Cluster(4, learners=n, jitter=0.3), FREE, 300.0) for n in (1, 8))
    assert (
        0.6 * one.updates < eight.updates < 0.8 * one.updates
    )  # the mean maximum of eight uniform times is 1.4 times their mean


def test_what_saturates_first():
    cluster = Cluster(10, actors=16, step=0.01, phase=200, update=0.1, least=0.001, most=0.01)
    found = cm.saturation(cluster, FREE)
    assert next(iter(found)) == "learner waits"
    assert found["learner"] == pytest.approx(10 / (0.001 * 1600))  # u / (r E)
    assert found["learner waits"] == pytest.approx(10 / (0.01 * 1600))
    slow_disk = dataclasses.replace(FREE, read_rate=24.0)
    assert cm.saturation(cluster, slow_disk)["reading"] == pytest.approx(1 / (0.001 * 1600))
    assert cm.predict(cluster, slow_disk).updates <= 1.0


def test_constants_are_saved_and_read_again(tmp_path):
    COSTLY.save(tmp_path / "c.json", machine="here")
    assert Constants.load_from(tmp_path / "c.json") == COSTLY
    (tmp_path / "d.json").write_text('{"constants": {"call": 1}}')
    with pytest.raises(ValueError, match="move_file"):
        Constants.load_from(tmp_path / "d.json")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"collectors": 0}, "collectors"), ({"collectors": 1, "step": 0.0}, "step"), ({"collectors": 1, "jitter": 0.9}, "jitter"),
        ({"collectors": 1, "least": 2.0, "most": 1.0}, "least"),
    ],
)  # fmt: skip
def test_impossible_clusters_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        Cluster(**fields)


def test_impossible_constants_and_times_are_refused():
    with pytest.raises(ValueError, match="copy_rate"):
        Constants(copy_rate=0.0)
    with pytest.raises(ValueError, match="look_file"):
        Constants(look_file=-1.0)
    with pytest.raises(ValueError, match="since"):
        simulate(Cluster(1), FREE, 10.0, since=10.0)
