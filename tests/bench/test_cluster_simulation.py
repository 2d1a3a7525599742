"""The simulation of a launched run keeps what every launch keeps, and agrees with the closed form where that is exact."""

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
    # what goes over a bus arrives in lumps, after which all collectors pause together, with old policies
    lumps = (cm.bundle_seconds(cluster) + 2 * cm.bus_seconds(cluster)) * found.updates / cluster.epoch if nodes else 0.0
    assert found.lag_versions == pytest.approx(expected.lag_versions, rel=0.2, abs=0.5 + lumps)
