import json

import gymnasium as gym
import numpy as np
import pytest
from counting_env import CountingEnv, make_counting, make_vector
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import naming

from amago import config
from amago.envs import AMAGOEnv, BilevelEpsilonGreedy, EpsilonGreedy, ExplorationWrapper, SequenceWrapper

unit = st.floats(0.0, 1.0)


def make(cls=EpsilonGreedy, kind="discrete", **bound):
    config.clear()
    config.bind({f"{cls.__name__}.{k}": v for k, v in bound.items()})
    env = cls(make_counting(0, kind=kind)())
    env.seed(0)
    return env


@settings(max_examples=60, deadline=None)
@given(start=unit, end=unit, anneal=st.integers(1, 1000), n=st.integers(0, 2000), u=st.floats(0, 0.999))
def test_epsilon_greedy_against_its_formula(start, end, anneal, n, u):
    env = make(eps_start=start, eps_end=end, steps_anneal=anneal)
    env.global_step, env.multiplier = n, np.array([u])
    line = start * (1 - n / anneal) + end * (n / anneal) if n < anneal else end
    np.testing.assert_allclose(env.current_eps(np.array([17])), [u * line], atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    a=unit,
    b=unit,
    c=unit,
    d=unit,
    anneal=st.integers(1, 1000),
    n=st.integers(0, 2000),
    horizon=st.integers(1, 50),
    t=st.integers(0, 60),
)
def test_bilevel_against_its_formula(a, b, c, d, anneal, n, horizon, t):
    env = make(
        BilevelEpsilonGreedy, rollout_horizon=horizon, steps_anneal=anneal, randomize_eps=False,
        eps_start_start=a, eps_start_end=b, eps_end_start=c, eps_end_end=d,
    )  # fmt: skip
    env.reset()
    env.global_step = n
    p, q = min(1.0, n / anneal), min(1.0, t / horizon)
    e0, e1 = (1 - p) * a + p * b, (1 - p) * c + p * d
    np.testing.assert_allclose(env.current_eps(np.array([t])), [(1 - q) * e0 + q * e1], atol=1e-12)


def test_defaults_are_the_published_ones():
    env = make(randomize_eps=False)
    env.reset()
    assert env.current_eps(np.zeros(1, int)) == 1.0
    env.global_step = 500_000
    assert env.current_eps(np.zeros(1, int)) == pytest.approx(0.525)
    env.global_step = 10**9
    assert env.current_eps(np.zeros(1, int)) == 0.05
    two = make(BilevelEpsilonGreedy, rollout_horizon=100, randomize_eps=False)
    two.reset()
    ends = [float(two.current_eps(np.array([t]))[0]) for t in (0, 100)]
    two.global_step = 10**6
    assert ends + [float(two.current_eps(np.array([t]))[0]) for t in (0, 100)] == pytest.approx([1.0, 0.8, 0.05, 0.01])


def test_the_factor_is_drawn_at_each_reset_or_is_one():
    env = make()
    drawn = []
    for _ in range(2000):
        env.reset()
        drawn.append(float(env.multiplier[0]))
    assert 0 <= min(drawn) < 0.01
    assert 0.99 < max(drawn) < 1
    assert np.mean(drawn) == pytest.approx(0.5, abs=0.03)
    env.step(np.array([[0]]))
    assert env.multiplier[0] == drawn[-1]
    fixed = make(randomize_eps=False)
    fixed.reset()
    assert fixed.multiplier[0] == 1.0


def test_counts_steps_over_all_rollouts():
    env = make(eps_start=0.0, eps_end=0.0)
    for _ in range(3):
        env.reset()
        assert env.local_step[0] == 0
        env.step(np.array([[1]]))
        assert env.local_step[0] == 1
        env.step(np.array([[1]]))
    assert env.global_step == 6


def noisy(kind, eps, action, n):
    env = make(kind=kind, eps_start=eps, eps_end=eps, randomize_eps=False)
    env.reset()
    return np.concatenate([env.add_exploration_noise(action, env.local_step) for _ in range(n)])


def test_discrete_noise_is_uniform_with_the_right_probability():
    out = noisy("discrete", 0.5, np.array([[2]]), 20_000)[:, 0]
    share = np.bincount(out, minlength=5) / len(out)
    np.testing.assert_allclose(share, [0.1, 0.1, 0.6, 0.1, 0.1], atol=0.015)
    assert (noisy("discrete", 0.0, np.array([[2]]), 100) == 2).all()


def held(kind, eps, action, n, repeat):
    """(n, S) actions of one long rollout whose random choices last ``repeat`` steps on average."""
    env = make(kind=kind, eps_start=eps, eps_end=eps, randomize_eps=False, repeat=repeat)
    env.reset()
    return np.concatenate([env.add_exploration_noise(action, env.local_step, None) for _ in range(n)])


@pytest.mark.parametrize("eps", [0.1, 0.5, 1.0])
def test_held_choices_take_the_same_share_of_steps_and_last_longer(eps):
    out = held("discrete", eps, np.array([[2]]), 40_000, repeat=8)[:, 0]
    share = np.bincount(out, minlength=5) / len(out)
    np.testing.assert_allclose(share, [eps / 5, eps / 5, 1 - 4 * eps / 5, eps / 5, eps / 5], atol=0.03)
    ends = np.flatnonzero(np.diff(out)) + 1
    lengths = np.diff(ends)[out[ends[:-1]] != 2]  # of the runs of an action that the policy did not choose
    assert lengths.mean() == pytest.approx(8, rel=0.3)
    assert lengths.max() > 16
    assert out[0] in range(5)


def test_held_continuous_noise_has_the_same_distribution_and_changes_now_and_then():
    out = held("continuous", 0.3, np.zeros((1, 2), np.float32), 40_000, repeat=5)
    assert out.dtype == np.float32
    assert out.std(axis=0) == pytest.approx([0.3, 0.3], rel=0.06)
    changes = (np.diff(out, axis=0) != 0).mean(axis=0)
    np.testing.assert_allclose(changes, 1 / 5, atol=0.01)


@pytest.mark.parametrize("kind", ["discrete", "continuous", "multibinary"])
def test_no_noise_is_held_where_eps_is_zero(kind):
    action = {"discrete": np.array([[2]]), "continuous": np.full((1, 2), 0.5, np.float32)}.get(kind)
    if action is None:
        env = make(kind=kind)
        action = np.ones((1, env.action_spec.stored_dim), np.int8)
    out = held(kind, 0.0, action, 50, repeat=4)
    assert out.dtype == action.dtype
    np.testing.assert_array_equal(out, np.repeat(action, 50, axis=0))


def test_a_held_choice_ends_with_its_rollout():
    env = make(eps_start=0.5, eps_end=0.5, randomize_eps=False, repeat=1e9)
    firsts = []
    for _ in range(400):
        env.reset()
        played = [int(env.add_exploration_noise(np.array([[2]]), env.local_step, None)[0, 0]) for _ in range(5)]
        assert len(set(played)) == 1, "neither does one end nor another begin in so few steps"
        firsts.append(played[0])
    np.testing.assert_allclose(np.bincount(firsts, minlength=5) / 400, [0.1, 0.1, 0.6, 0.1, 0.1], atol=0.07)


def test_continuous_noise_is_normal_and_clipped():
    action = np.array([[0.0, 0.9]], np.float32)
    out = noisy("continuous", 0.3, action, 20_000)
    assert out.dtype == np.float32
    assert np.abs(out).max() == 1.0
    assert out[:, 0].std() == pytest.approx(0.3, rel=0.03)
    assert (out[:, 1] == 1.0).mean() == pytest.approx(0.3694, abs=0.02)  # P(N(0, 1) > 1/3)
    np.testing.assert_array_equal(action, np.array([[0.0, 0.9]], np.float32))
    np.testing.assert_array_equal(noisy("continuous", 0.0, action, 3), np.repeat(action, 3, axis=0))


def test_bits_are_flipped_with_the_right_probability():
    action = np.array([[0, 1, 0, 1]], np.int8)
    out = noisy("multibinary", 0.2, action, 5000)
    assert out.dtype == np.int8
    np.testing.assert_allclose((out != action).mean(axis=0), 0.2, atol=0.025)
    assert (noisy("multibinary", 1.0, action, 3) == 1 - action).all()


@pytest.mark.parametrize("kind", ["discrete", "continuous", "multibinary"])
def test_batches_draw_for_each_row(kind):
    """Each row has its own factor, drawn again only where a rollout opens."""
    config.bind({"EpsilonGreedy.eps_start": 1.0, "EpsilonGreedy.eps_end": 1.0})
    env = EpsilonGreedy(make_vector(4, gym.vector.AutoresetMode.NEXT_STEP, kind=kind)())
    env.seed(1)
    env.reset()
    assert len(set(env.multiplier)) == 4
    action, changed, redrawn = env.action_spec.zeros(4), np.zeros(4), 0
    for _ in range(40):
        before = env.multiplier.copy()
        env.step(action)
        changed += (env.amago_env.last_action != action).any(axis=1)
        opened = env.amago_env.auto.opened
        np.testing.assert_array_equal(env.multiplier != before, opened)
        assert (env.local_step[opened] == 0).all()
        assert (env.local_step[~opened] > 0).all()
        redrawn += opened.sum()
    assert redrawn > 10
    assert (changed > 0).all()
    env.multiplier = np.array([0.0, 1.0, 0.0, 1.0])
    if kind == "discrete":
        out = np.concatenate([env.add_exploration_noise(action, env.local_step) for _ in range(500)], axis=1)
        assert (out[[0, 2]] == 0).all()
        assert (out[[1, 3]] != 0).mean() == pytest.approx(0.8, abs=0.05)


def test_the_recorded_action_is_the_one_taken():
    class Opposite(ExplorationWrapper):
        def add_exploration_noise(self, action, local_step):
            assert local_step.shape == (1,)
            return 4 - action

    recorder = SequenceWrapper(Opposite(AMAGOEnv(CountingEnv(0))), save_trajs_to=None)
    recorder.reset()
    obs = recorder.step(np.array([[1]]))[0]
    assert obs["took"][0, 0] == 3 + 3  # the space starts at 3
    assert recorder.current_timestep[1][0, 1:].argmax() == 3
    with pytest.raises(NotImplementedError):
        ExplorationWrapper(make_counting(0)()).add_exploration_noise(np.array([[1]]), np.zeros(1))


def test_hooks_of_three_arguments_get_the_horizon():
    """The form of amago 0.1."""
    seen = []

    class Old(ExplorationWrapper):
        def add_exploration_noise(self, action, local_step, horizon):
            seen.append(horizon)
            return action

    class Odd(ExplorationWrapper):
        def add_exploration_noise(self, action):
            return action

    env = Old(AMAGOEnv(gym.make("CartPole-v1", max_episode_steps=12)))
    env.reset()
    env.step(0)
    assert seen == [12]
    with pytest.raises(TypeError, match=naming("Odd", "(action, local_step)")):
        Odd(make_counting(0)())


def test_state_goes_on_where_it_stopped():
    def play(env, n):
        out = []
        for _ in range(n):
            env.reset()
            out += [env.step(np.array([[0]]))[0].obs["took"][0, 0] for _ in range(2)] + [env.multiplier[0]]
        return out

    env = make(steps_anneal=40)
    play(env, 5)
    state = json.loads(json.dumps(env.state_dict()))
    expected = play(env, 10)
    fresh = make(steps_anneal=40)
    fresh.load_state_dict(state)
    assert fresh.global_step == 10
    assert fresh.multiplier[0] == state["multiplier"][0]
    assert play(fresh, 10) == expected
    assert len(set(expected)) > 10
    with pytest.raises(ValueError, match=naming("multiplier", 2, 1)):
        fresh.load_state_dict(state | {"multiplier": [1.0, 0.5]})


def test_wrong_settings_are_refused():
    for cls, name, value in (
        (EpsilonGreedy, "eps_start", 1.5),
        (EpsilonGreedy, "eps_end", -0.1),
        (EpsilonGreedy, "steps_anneal", 0),
        (EpsilonGreedy, "repeat", 0.5),
        (EpsilonGreedy, "repeat", float("inf")),
        (BilevelEpsilonGreedy, "repeat", 0),
        (BilevelEpsilonGreedy, "eps_end_end", 2.0),
        (BilevelEpsilonGreedy, "rollout_horizon", 0),
    ):
        bound = {"rollout_horizon": 5, name: value} if cls is BilevelEpsilonGreedy else {name: value}
        with pytest.raises(ValueError, match=naming(name, value)):
            make(cls, **bound)
    config.clear()
    with pytest.raises(RuntimeError, match="rollout_horizon"):
        BilevelEpsilonGreedy(make_counting(0)())


def test_the_length_of_held_choices_may_be_drawn_for_each_rollout():
    env = make(eps_start=1.0, eps_end=1.0, randomize_eps=False, repeat=(1, 16))
    lengths = []
    for _ in range(120):
        env.reset()
        played = np.concatenate([env.add_exploration_noise(np.array([[2]]), env.local_step) for _ in range(300)])[:, 0]
        changes = (np.diff(played) != 0).mean() / 0.8  # a new choice is the one before in a fifth of the cases
        lengths.append(1 / changes)
    logs = np.log(lengths)
    assert np.exp(logs.mean()) == pytest.approx(4, rel=0.25)
    assert (np.array(lengths) < 2).mean() == pytest.approx(0.25, abs=0.12)
    assert (np.array(lengths) > 8).mean() == pytest.approx(0.25, abs=0.12)


@pytest.mark.parametrize("repeat", [0.5, (4, 2), (0, 3), (1, 2, 3), float("inf")])
def test_a_wrong_length_of_choices_is_refused(repeat):
    with pytest.raises(
        ValueError, match=r"repeat is .*, but must be a number of steps, 1 or more, or a pair \(low, high\) of them"
    ):
        make(repeat=repeat)
