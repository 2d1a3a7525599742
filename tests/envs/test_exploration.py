"""Exploration: schedules, noise, the probability of an action after it, and what is recorded."""

import json

import gymnasium as gym
import numpy as np
import pytest
from counting_env import make_counting, make_vector
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import check_refused, naming, refused

import amago
from amago import config
from amago.envs import BilevelEpsilonGreedy, EpsilonGreedy

unit = st.floats(0.0, 1.0)


def make(cls=EpsilonGreedy, env=None, kind="discrete", **bound):
    config.clear()
    config.bind({f"{cls.__name__}.{k}": v for k, v in bound.items()})
    made = cls(env or make_counting(0, kind=kind)())
    made.seed(0)
    made.reset()
    return made


def noisy(kind, eps, action, n, **bound):
    """(n, S) actions of one long rollout."""
    env = make(kind=kind, eps_start=eps, eps_end=eps, randomize_eps=False, **bound)
    return np.concatenate([env.add_exploration_noise(action, env.local_step) for _ in range(n)])


@settings(max_examples=60, deadline=None)
@given(
    ends=st.tuples(unit, unit, unit, unit), anneal=st.integers(1, 1000), n=st.integers(0, 2000), u=st.floats(0, 0.999),
    horizon=st.integers(1, 50), t=st.integers(0, 60),
)  # fmt: skip
def test_schedules_against_their_formulas(ends, anneal, n, u, horizon, t):
    a, b, c, d = ends
    p, q = min(1.0, n / anneal), min(1.0, t / horizon)
    e0, e1 = (1 - p) * a + p * b, (1 - p) * c + p * d
    one = make(eps_start=a, eps_end=b, steps_anneal=anneal)
    two = make(
        BilevelEpsilonGreedy, rollout_horizon=horizon, steps_anneal=anneal, eps_start_start=a, eps_start_end=b, eps_end_start=c, eps_end_end=d
    )  # fmt: skip
    for env, expected in ((one, e0), (two, (1 - q) * e0 + q * e1)):
        env.global_step, env.global_multiplier = n, np.array([u])
        np.testing.assert_allclose(env.current_eps(np.array([t])), [u * expected], atol=1e-12)


def test_state_goes_on_where_it_stopped():
    def play(env, n):
        out = []
        for _ in range(n):
            env.reset()
            out += [env.step(np.array([[0]]))[0].obs["took"][0, 0] for _ in range(2)] + [env.global_multiplier[0]]
        return out

    env, fresh = make(steps_anneal=40), make(steps_anneal=40)
    play(env, 5)
    state = json.loads(json.dumps(env.state_dict()))
    expected = play(env, 10)
    fresh.load_state_dict(state)
    assert (fresh.global_step, fresh.global_multiplier[0]) == (10, state["multiplier"][0])
    assert play(fresh, 10) == expected
    assert len(set(expected)) > 10
    two = state | {"multiplier": [1.0, 0.5]}
    check_refused(ValueError, (naming("multiplier", 2, 1), lambda: fresh.load_state_dict(two)))


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (EpsilonGreedy, "eps_start", 1.5), (EpsilonGreedy, "eps_end", -0.1), (EpsilonGreedy, "steps_anneal", 0), (EpsilonGreedy, "repeat", 0.5),
        (EpsilonGreedy, "repeat", (4, 2)), (EpsilonGreedy, "repeat", (1, 2, 3)), (EpsilonGreedy, "repeat", float("inf")),
        (BilevelEpsilonGreedy, "repeat", 0), (BilevelEpsilonGreedy, "eps_end_end", 2.0), (BilevelEpsilonGreedy, "rollout_horizon", 0),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(cls, name, value):
    bound = {"rollout_horizon": 5, name: value} if cls is BilevelEpsilonGreedy else {name: value}
    check_refused(ValueError, (naming(name, value), lambda: make(cls, **bound)))
    config.clear()
    check_refused(RuntimeError, ("rollout_horizon", lambda: BilevelEpsilonGreedy(make_counting(0)())))


@pytest.mark.parametrize("repeat", [1, 8])
@pytest.mark.parametrize("eps", [0.0, 0.1, 0.5, 1.0])
def test_discrete_noise_is_uniform_with_the_right_probability(eps, repeat):
    out = noisy("discrete", eps, np.array([[2]]), 20_000, repeat=repeat)[:, 0]
    share = np.bincount(out, minlength=5) / len(out)
    np.testing.assert_allclose(
        share, [eps / 5, eps / 5, 1 - 4 * eps / 5, eps / 5, eps / 5], atol=0.015 if repeat == 1 else 0.03
    )
    if repeat > 1 and eps:
        ends = np.flatnonzero(np.diff(out)) + 1
        lengths = np.diff(ends)[out[ends[:-1]] != 2]  # of the runs of an action that the policy did not choose
        assert lengths.mean() == pytest.approx(8, rel=0.3)
        assert lengths.max() > 16


def test_continuous_noise_is_normal_clipped_and_may_be_held():
    action = np.array([[0.0, 0.9]], np.float32)
    out = noisy("continuous", 0.3, action, 20_000)
    assert (out.dtype, np.abs(out).max()) == (np.float32, 1.0)
    assert out[:, 0].std() == pytest.approx(0.3, rel=0.03)
    assert (out[:, 1] == 1.0).mean() == pytest.approx(0.3694, abs=0.02)  # P(N(0, 1) > 1/3)
    np.testing.assert_array_equal(action, np.array([[0.0, 0.9]], np.float32))
    np.testing.assert_array_equal(noisy("continuous", 0.0, action, 3), np.repeat(action, 3, axis=0))
    held = noisy("continuous", 0.3, np.zeros((1, 2), np.float32), 20_000, repeat=5)
    assert held.dtype == np.float32
    assert held.std(axis=0) == pytest.approx([0.3, 0.3], rel=0.08)
    np.testing.assert_allclose((np.diff(held, axis=0) != 0).mean(axis=0), 1 / 5, atol=0.015)


def test_bits_are_flipped_with_the_right_probability():
    action = np.array([[0, 1, 0, 1]], np.int8)
    out = noisy("multibinary", 0.2, action, 5000)
    assert out.dtype == np.int8
    np.testing.assert_allclose((out != action).mean(axis=0), 0.2, atol=0.025)
    assert (noisy("multibinary", 1.0, action, 3) == 1 - action).all()


@pytest.mark.parametrize("kind", ["discrete", "continuous", "multibinary"])
def test_batches_draw_for_each_row(kind):
    """Each row has its own factor, drawn again only where a rollout opens."""
    rows = make_vector(4, gym.vector.AutoresetMode.NEXT_STEP, kind=kind)()
    env = make(env=rows, eps_start=1.0, eps_end=1.0)
    assert len(set(env.global_multiplier)) == 4
    action, changed, redrawn = env.action_spec.zeros(4), np.zeros(4), 0
    for _ in range(40):
        before = env.global_multiplier.copy()
        env.step(action)
        changed += (rows.last_action != action).any(axis=1)
        np.testing.assert_array_equal(env.global_multiplier != before, rows.auto.opened)
        np.testing.assert_array_equal(env.local_step == 0, rows.auto.opened)
        redrawn += rows.auto.opened.sum()
    assert redrawn > 10
    assert (changed > 0).all()
    env.global_multiplier = np.array([0.0, 1.0, 0.0, 1.0])
    if kind == "discrete":
        out = np.concatenate([env.add_exploration_noise(action, env.local_step) for _ in range(500)], axis=1)
        assert (out[[0, 2]] == 0).all()
        assert (out[[1, 3]] != 0).mean() == pytest.approx(0.8, abs=0.05)


def test_a_field_known_by_name_is_not_misspelt():
    with refused(ValueError, "extra_fields[0]", "'log_probs'", "'log_prob'"):
        amago.loading.dataset.check_extra_fields(["log_probs"])
