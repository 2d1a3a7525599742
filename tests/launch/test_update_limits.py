"""Limits of the number of updates per environment step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amago.run.launched.protocol import UpdateLimits

RATES = st.floats(0, 100, allow_nan=False)
COUNTS = st.integers(0, 10**12)


@st.composite
def limits(draw):
    least, most = sorted((draw(RATES), draw(st.one_of(st.just(math.inf), RATES.filter(lambda x: x > 0)))))
    return UpdateLimits(least, most or 1.0, draw(st.integers(0, 10**6)))


@given(limits(), COUNTS, COUNTS)
def test_never_both_wait(limit, updates, steps):
    assert not (limit.learner_waits(updates, steps) and limit.collectors_pause(updates, steps))


@given(
    least=st.floats(0.001, 2),
    width=st.floats(1, 10),
    actions=st.lists(st.tuples(st.booleans(), st.integers(1, 50)), min_size=1, max_size=200),
)
def test_the_ratio_stays_within_the_limits_up_to_the_work_in_flight(least, width, actions):
    """Learner and collectors take turns in any order; whoever may work does. Each turn of a collector is one file in flight."""
    limit, updates, steps, largest = UpdateLimits(least, least * width), 0, 0, 0
    for learner_first, size in actions:
        for learner in (learner_first, not learner_first):
            if learner:
                while not limit.learner_waits(updates, steps) and limit.collectors_pause(updates, steps):
                    updates += 1
            elif not limit.collectors_pause(updates, steps):
                steps, largest = steps + size, max(largest, size)
        assert updates <= limit.most * steps
        assert updates + 1 > limit.least * (steps - largest)


def test_before_the_warm_up_is_over_the_learner_waits_and_collectors_go_on():
    limit = UpdateLimits(1.0, 2.0, warmup=100)
    assert limit.learner_waits(0, 99)
    assert not limit.collectors_pause(0, 99)
    assert not limit.learner_waits(0, 100)
    assert limit.collectors_pause(0, 100)


@pytest.mark.parametrize(
    ("text", "least", "most"), [("0.01:0.05", 0.01, 0.05), (":0.5", 0, 0.5), ("0.5:", 0.5, math.inf), (":", 0, math.inf)]
)
def test_limits_are_read_from_text(text, least, most):
    assert UpdateLimits.parse(text) == UpdateLimits(least, most)


@pytest.mark.parametrize("text", ["", "0.1", "a:b", "1:2:3", "0.2:0.1", "-1:2", ":0", "nan:1", "1:nan", "inf:inf"])
def test_what_are_no_limits_is_refused(text):
    with pytest.raises(ValueError, match="updates per environment step"):
        UpdateLimits.parse(text)
