"""Counting attempts: against a rollout that is written out step by step."""

from __future__ import annotations

from amago.envs.builtin._attempts import Attempts


def test_two_attempts_of_two_steps() -> None:
    attempts = Attempts(2, 2)
    assert not attempts.under_way, "no rollout has begun"
    for _ in range(2):  # a second rollout is like the first
        attempts.begin_rollout()
        attempts.begin()
        assert (attempts.under_way, attempts.progress) == (True, (0.0, 0.0))
        assert not attempts.step(1.0)
        assert attempts.progress == (0.5, 0.0)
        assert attempts.step(0.5)
        assert attempts.end({"Success": 1.0}) == {
            "AMAGO_LOG_METRIC Attempt 0 Success": 1.0,
            "AMAGO_LOG_METRIC Attempt 0 Return": 1.5,
        }
        assert (attempts.under_way, attempts.progress) == (True, (1.0, 0.5))

        attempts.begin()
        assert attempts.progress == (0.0, 0.5)
        assert not attempts.step(0.0)
        assert attempts.step(-2.0)
        assert attempts.end({}) == {"AMAGO_LOG_METRIC Attempt 1 Return": -2.0}
        assert (attempts.under_way, attempts.progress) == (False, (1.0, 1.0))


def test_a_rollout_that_is_begun_anew_counts_from_the_start() -> None:
    attempts = Attempts(1, 3)
    attempts.begin_rollout()
    attempts.begin()
    attempts.step(5.0)
    attempts.begin_rollout()
    attempts.begin()
    assert [attempts.step(1.0) for _ in range(3)] == [False, False, True]
    assert list(attempts.end({}).values()) == [3.0]
