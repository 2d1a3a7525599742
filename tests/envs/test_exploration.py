"""Exploration: schedules, noise, the probability of an action after it, and what is recorded."""

import json

import gymnasium as gym
import numpy as np
import pytest
import tiny
from counting_env import ACTIONS, CountingEnv, make_counting, make_vector
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import check_refused, naming

import amago
from amago import config
from amago.envs import AMAGOEnv, BilevelEpsilonGreedy, EpsilonGreedy, ExplorationWrapper, SequenceWrapper
from amago.run.settings import SettingsError

unit = st.floats(0.0, 1.0)
POLICY = {"discrete": [0.5, 0.3, 0.1, 0.06, 0.04], "multibinary": [0.9, 0.5, 0.2, 0.05]}


class Endless(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, kind):
        self.action_space = ACTIONS[kind]

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


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


def test_defaults_are_the_published_ones():
    env, two = make(randomize_eps=False), make(BilevelEpsilonGreedy, rollout_horizon=100, randomize_eps=False)
    found = []
    for env.global_step in (0, 500_000, 10**9):
        found.append(float(env.current_eps(np.zeros(1, int))[0]))
    for two.global_step in (0, 10**6):
        found += [float(two.current_eps(np.array([t]))[0]) for t in (0, 100)]
    assert found == pytest.approx([1.0, 0.525, 0.05, 1.0, 0.8, 0.05, 0.01])


def test_the_factor_is_drawn_at_each_reset_or_is_one():
    env, drawn = make(), []
    for _ in range(2000):
        env.reset()
        drawn.append(float(env.global_multiplier[0]))
    assert 0 <= min(drawn) < 0.01 < 0.99 < max(drawn) < 1
    assert np.mean(drawn) == pytest.approx(0.5, abs=0.03)
    env.step(np.array([[0]]))
    assert env.global_multiplier[0] == drawn[-1]
    assert make(randomize_eps=False).global_multiplier[0] == 1.0


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


def test_the_recorded_action_is_the_one_taken():
    class Opposite(ExplorationWrapper):
        def add_exploration_noise(self, action, local_step):
            assert local_step.shape == (1,)
            return 4 - action

    recorder = SequenceWrapper(Opposite(AMAGOEnv(CountingEnv(0))), save_trajs_to=None)
    recorder.reset()
    assert recorder.step(np.array([[1]]))[0]["took"][0, 0] == 3 + 3  # the space starts at 3
    assert recorder.current_timestep[1][0, 1:].argmax() == 3
    with pytest.raises(NotImplementedError):
        ExplorationWrapper(make_counting(0)()).add_exploration_noise(np.array([[1]]), np.zeros(1))


@pytest.mark.parametrize("repeat", [1.0, 4.0, (2.0, 9.0)])
@pytest.mark.parametrize("kind", ["discrete", "multibinary"])
@pytest.mark.parametrize("eps", [0.0, 0.3, 0.9])
def test_predicted_probabilities_are_those_of_what_is_done(kind, repeat, eps):
    n = 4000
    env = make(env=AMAGOEnv(Endless(kind)), eps_start=eps, eps_end=eps, repeat=repeat, randomize_eps=False)
    p, rng = np.array([POLICY[kind]]), np.random.default_rng(1)
    log_prob = env.record_behaviour(np.concatenate((np.zeros((1, 1)), p), axis=1))
    rows = []
    for _ in range(n):
        drawn = [[rng.choice(len(p[0]), p=p[0])]] if kind == "discrete" else (rng.random(p.shape) < p).astype(np.int8)
        rows.append([env.action_probabilities(p, env.local_step)[0]])
        step = env.step(np.array(drawn))[0]
        rows[-1] += [step.prev_action[0], log_prob[0]]
    predicted, taken, logged = (np.array(x, np.float64) for x in zip(*rows))
    if kind == "discrete":
        np.testing.assert_allclose(predicted.sum(axis=1), 1.0)
        chosen = (predicted * taken).sum(axis=1)
    else:
        chosen = np.where(taken > 0, predicted, 1.0 - predicted).prod(axis=1)
    np.testing.assert_allclose(logged, np.log(chosen), atol=1e-6)
    before = np.concatenate((np.zeros_like(taken[:1]), taken[:-1]))
    surprise = np.where(before == taken, 0.0, 1.0)
    for weight in (np.ones_like(taken), before, np.concatenate((np.zeros_like(surprise[:1]), surprise[:-1]))):
        error = ((taken - predicted) * weight).mean(axis=0)
        assert (np.abs(error) < 5 / np.sqrt(n)).all(), "right on average, and given what was done in the step before"
    if repeat == 1.0:
        by_hand = (1 - eps) * p + (eps / 5 if kind == "discrete" else eps * (1 - p))
        np.testing.assert_allclose(predicted, np.tile(by_hand, (n, 1)))
    elif eps == 0.3:
        assert len(np.unique(predicted.round(6), axis=0)) > 1, "a choice that is being held is likely to be taken again"


class Masked(gym.Env):
    """Ten steps with four actions, of which two are legal, drawn in each step; the reward is 1 for the lower one."""

    observation_space = gym.spaces.Dict({"mask": gym.spaces.MultiBinary(4), "x": gym.spaces.Box(-1, 1, (2,))})
    action_space = gym.spaces.Discrete(4)

    def _obs(self):
        self.legal = np.sort(self.np_random.choice(4, 2, replace=False))
        return {"mask": np.isin(np.arange(4), self.legal).astype(np.int8), "x": np.zeros(2, np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        assert action in self.legal
        self.t += 1
        return self._obs(), float(action == self.legal[0]), self.t == 10, False, {}


class Several(tiny.Bits):
    """Choices and bits in one action."""

    action_space = gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.MultiBinary(2), gym.spaces.Discrete(2)))

    def step(self, action):
        return super().step(np.array([action[0] > 0, *action[1]]))


def both():
    return AMAGOEnv(Several(), env_name="Several")


def recorded(root, make_env, extra_fields=("behaviour_log_prob", "log_prob"), **fields):
    e = tiny.learned(root, make_env, extra_fields=list(extra_fields), train_timesteps_per_epoch=60, **fields)
    batch = e.dataset.sample_batch(np.random.default_rng(0), 8)
    return {k: x[batch.transition_mask[..., 0]].numpy() for k, x in batch.extras.items()}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_mixture_of_policy_and_noise_is_recorded(tmp_path, mode):
    config.bind({"EpsilonGreedy.eps_start": 0.4, "EpsilonGreedy.eps_end": 0.4, "EpsilonGreedy.randomize_eps": False})
    found = recorded(tmp_path, tiny.cartpole, env_mode=mode, env_workers=1)
    mu, chosen = np.exp(found["behaviour_log_prob"]), np.exp(found["log_prob"])
    same = np.isclose(mu, 0.6 * chosen + 0.2, atol=1e-5)
    other = np.isclose(mu, 0.6 * (1.0 - chosen) + 0.2, atol=1e-5)  # noise replaced the policy's choice by the other action
    assert (same | other).all()
    assert 0.05 < (~same).mean() < 0.4


def test_without_exploration_it_is_the_policys_own(tmp_path):
    for make_env in (tiny.cartpole, tiny.pendulum, tiny.bits, both):
        found = recorded(tmp_path / make_env.__name__, make_env, exploration_wrapper_type=None)
        np.testing.assert_allclose(found["behaviour_log_prob"], found["log_prob"], atol=1e-6)
    options = {"exploration_wrapper_type": None, "sample_actions_train": False}
    assert (recorded(tmp_path / "a", tiny.cartpole, **options)["behaviour_log_prob"] == 0).all()
    density = recorded(tmp_path / "b", tiny.pendulum, **options)["behaviour_log_prob"]
    assert (density > 1e8).all(), "a density without bound: nothing is as likely under another policy"


class Unknown(EpsilonGreedy):
    """Other noise, without its probabilities."""

    def add_exploration_noise(self, action, local_step):
        return action * 0


class Alone(ExplorationWrapper):
    def add_exploration_noise(self, action, local_step):
        return action


class Known(Unknown):
    def action_probabilities(self, probabilities, local_step):
        return np.eye(probabilities.shape[1])[[0] * len(probabilities)]


def test_noise_of_unknown_probabilities_is_refused(tmp_path):
    refused = [(kind.__name__, tiny.cartpole, kind, "action_probabilities") for kind in (Unknown, Alone)]
    for name, make_env, kind, remedy in [
        *refused, ("EpsilonGreedy", tiny.pendulum, EpsilonGreedy, "exploration_wrapper_type=None")
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=naming("behaviour_log_prob", name, remedy)):
            recorded(tmp_path / name, make_env, exploration_wrapper_type=kind)
    found = recorded(tmp_path, tiny.cartpole, exploration_wrapper_type=Known)
    assert (found["behaviour_log_prob"] == 0).all()


def test_the_field_has_one_source_and_one_shape():
    field, check = amago.ExtraField, amago.loading.dataset.check_extra_fields
    check_refused(
        ValueError,
        (naming("behaviour_log_prob", "source", "policy"), lambda: field("behaviour_log_prob", rows="T", source="policy")),
        (naming("mine", "source", "behaviour"), lambda: field("mine", rows="T", source="behaviour")),
        (
            naming("behaviour_log_prob", "shape", (2,)),
            lambda: field("behaviour_log_prob", rows="T", shape=(2,), source="behaviour"),
        ),
        (naming("extra_fields[0]", "'log_probs'", "'log_prob'"), lambda: check(["log_probs"])),
    )


def test_retrace_trains_and_asks_for_its_field(tmp_path):
    config.bind({"Agent.targets": "retrace"})
    check_refused(SettingsError, (naming("Agent", "extra_fields", "behaviour_log_prob"), lambda: tiny.started(tmp_path / "a")))
    e = tiny.learned(tmp_path / "b", extra_fields=["behaviour_log_prob"])
    assert e.learner.grad_steps == 2
    values = {name: v for row in tiny.rows(e.run_dir, "train") for name, v in row["values"].items()}
    assert 0.0 < values["Trace Coefficient (main gamma)"] < 0.95
