"""The probability of an action after exploration: against what the noise does, and as it is recorded."""

import gymnasium as gym
import numpy as np
import pytest
import tiny
from counting_env import make_counting
from messages import naming

import amago
from amago import config
from amago.envs import AMAGOEnv, EpsilonGreedy, ExplorationWrapper
from amago.envs.behaviour import BehaviourLog, check_known
from amago.envs.legal import legal_probabilities
from amago.run.checks import SettingsError
from amago.spaces import action_spec

N = 8_000
POLICY = {"discrete": [0.5, 0.3, 0.1, 0.06, 0.04], "multibinary": [0.9, 0.5, 0.2, 0.05]}


def explorer(kind, **bound):
    config.clear()
    config.bind({f"EpsilonGreedy.{k}": v for k, v in ({"randomize_eps": False} | bound).items()})
    env = EpsilonGreedy(make_counting(0, kind=kind)())
    env.seed(0)
    env.reset()
    return env


def rolled(env, kind, n=N):
    """Predicted probabilities (n, A), vectors of the actions taken (n, A), and their recorded log-probabilities (n,)."""
    p, rng = np.array([POLICY[kind]]), np.random.default_rng(1)
    log = BehaviourLog(np.concatenate((np.zeros((1, 1)), p), axis=1), env)
    predicted, taken, logged = [], [], []
    for _ in range(n):
        chosen = (
            np.array([[rng.choice(len(p[0]), p=p[0])]]) if kind == "discrete" else (rng.random(p.shape) < p).astype(np.int8)
        )
        predicted.append(env.action_probabilities(p, env.local_step)[0])
        taken.append(env.action_spec.to_vector(log.explored(env, chosen, None))[0])
        logged.append(log.log_prob[0])
    return np.array(predicted), np.array(taken, np.float64), np.array(logged)


@pytest.mark.parametrize("repeat", [1.0, 4.0, (2.0, 9.0)])
@pytest.mark.parametrize("kind", ["discrete", "multibinary"])
@pytest.mark.parametrize("eps", [0.0, 0.3, 0.9])
def test_predicted_probabilities_are_those_of_what_is_done(kind, repeat, eps):
    env = explorer(kind, eps_start=eps, eps_end=eps, repeat=repeat)
    predicted, taken, logged = rolled(env, kind)
    if kind == "discrete":
        np.testing.assert_allclose(predicted.sum(axis=1), 1.0)
        chosen = (predicted * taken).sum(axis=1)
    else:
        chosen = np.where(taken > 0, predicted, 1.0 - predicted).prod(axis=1)
    np.testing.assert_allclose(logged, np.log(chosen), atol=1e-6)
    before = np.concatenate((np.zeros_like(taken[:1]), taken[:-1]))
    surprise = np.where(before == taken, 0.0, 1.0)
    for given in (np.ones_like(taken), before, np.concatenate((np.zeros_like(surprise[:1]), surprise[:-1]))):
        error = ((taken - predicted) * given).mean(axis=0)
        assert (np.abs(error) < 5 / np.sqrt(N)).all(), "right on average, and given what was done in the step before"
    if repeat == 1.0:
        by_hand = (1 - eps) * np.array(POLICY[kind])
        by_hand = by_hand + (eps / 5 if kind == "discrete" else eps * (1 - np.array(POLICY[kind])))
        np.testing.assert_allclose(predicted, np.tile(by_hand, (N, 1)))
    elif eps == 0.3:
        assert len(np.unique(predicted.round(6), axis=0)) > 1, "a choice that is being held is likely to be taken again"


def test_illegal_choices_give_their_probability_to_the_legal_ones():
    spec = action_spec(gym.spaces.Discrete(4))
    p = np.array([[0.1, 0.2, 0.3, 0.4]] * 3)
    mask = np.array([[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
    np.testing.assert_allclose(legal_probabilities(spec, p, mask), [[0.45, 0.55, 0, 0], [0, 0, 1, 0], p[2]])
    bits = action_spec(gym.spaces.MultiBinary(2))
    np.testing.assert_allclose(legal_probabilities(bits, np.array([[0.3, 0.6]]), np.array([[1, 0]])), [[0.3, 0.0]])


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


def both():
    return AMAGOEnv(Several(), env_name="Several")


class Several(tiny.Bits):
    """Choices and bits in one action."""

    action_space = gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.MultiBinary(2), gym.spaces.Discrete(2)))

    def step(self, action):
        return super().step(np.array([action[0] > 0, *action[1]]))


RANDOM = {"EpsilonGreedy.eps_start": 1.0, "EpsilonGreedy.eps_end": 1.0, "EpsilonGreedy.randomize_eps": False}


def recorded(root, make_env, extra_fields=("behaviour_log_prob", "log_prob"), **fields):
    e = tiny.learned(root, make_env, extra_fields=list(extra_fields), train_timesteps_per_epoch=60, **fields)
    batch = e.dataset.sample_batch(np.random.default_rng(0), 8)
    return {k: x[batch.transition_mask[..., 0]].numpy() for k, x in batch.extras.items()}, batch


@pytest.mark.parametrize(
    ("make_env", "count"),
    [(tiny.cartpole, 2), (tiny.bits, 8), (both, 24), (lambda: AMAGOEnv(Masked(), env_name="Masked"), 2)],
    ids=["choice", "bits", "several", "masked"],
)
def test_actions_that_are_all_random_are_recorded_with_equal_probabilities(tmp_path, make_env, count):
    config.bind(RANDOM | ({"ActionMask.key": "mask"} if "Masked" in make_env().env_name else {}))
    if count == 8:
        config.bind({"EpsilonGreedy.eps_start": 0.5, "EpsilonGreedy.eps_end": 0.5})  # each bit flipped half of the time
    if count == 24:
        config.bind({"EpsilonGreedy.eps_start": 1.0, "EpsilonGreedy.eps_end": 1.0})
    found, _ = recorded(tmp_path, make_env)
    if count == 24:  # choices are uniform, bits are all flipped
        assert (found["behaviour_log_prob"] < -np.log(6) + 1e-6).all()
        return
    np.testing.assert_allclose(found["behaviour_log_prob"], -np.log(count), atol=1e-6)
    assert not np.allclose(found["log_prob"], -np.log(count), atol=1e-6)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_mixture_of_policy_and_noise_is_recorded(tmp_path, mode):
    config.bind(RANDOM | {"EpsilonGreedy.eps_start": 0.4, "EpsilonGreedy.eps_end": 0.4})
    found, _ = recorded(tmp_path, tiny.cartpole, env_mode=mode)
    mu, chosen = np.exp(found["behaviour_log_prob"]), np.exp(found["log_prob"])
    same = np.isclose(mu, 0.6 * chosen + 0.2, atol=1e-5)
    other = np.isclose(mu, 0.6 * (1.0 - chosen) + 0.2, atol=1e-5)  # noise replaced the policy's choice by the other action
    assert (same | other).all()
    assert 0.05 < (~same).mean() < 0.4


@pytest.mark.parametrize("make_env", [tiny.cartpole, tiny.pendulum, tiny.bits, both])
def test_without_exploration_it_is_the_policys_own(tmp_path, make_env):
    found, _ = recorded(tmp_path, make_env, exploration_wrapper_type=None)
    np.testing.assert_allclose(found["behaviour_log_prob"], found["log_prob"], atol=1e-6)


def test_greedy_rollouts_leave_nothing_to_chance(tmp_path):
    options = {"exploration_wrapper_type": None, "sample_actions_train": False}
    found, _ = recorded(tmp_path / "a", tiny.cartpole, **options)
    assert (found["behaviour_log_prob"] == 0).all()
    found, _ = recorded(tmp_path / "b", tiny.pendulum, **options)
    assert (found["behaviour_log_prob"] > 1e8).all(), "a density without bound: nothing is as likely under another policy"


class Unknown(EpsilonGreedy):
    """Noise of its own, and no word on what is likely."""

    def add_exploration_noise(self, action, local_step):
        return action * 0


class Alone(ExplorationWrapper):
    def add_exploration_noise(self, action, local_step):
        return action


class Known(Unknown):
    def action_probabilities(self, probabilities, local_step):
        return np.eye(probabilities.shape[1])[[0] * len(probabilities)]


@pytest.mark.parametrize("kind", [Unknown, Alone])
def test_noise_of_unknown_probabilities_is_refused(tmp_path, kind):
    with pytest.raises(ValueError, match=naming("behaviour_log_prob", kind.__name__, "action_probabilities")):
        recorded(tmp_path, tiny.cartpole, exploration_wrapper_type=kind)


def test_a_subclass_that_says_what_is_likely_is_believed(tmp_path):
    check_known(Known(tiny.cartpole()))
    found, _ = recorded(tmp_path, tiny.cartpole, exploration_wrapper_type=Known)
    assert (found["behaviour_log_prob"] == 0).all()


def test_noise_on_numbers_is_refused(tmp_path):
    with pytest.raises(ValueError, match=naming("behaviour_log_prob", "EpsilonGreedy", "exploration_wrapper_type=None")):
        recorded(tmp_path, tiny.pendulum)


def test_the_field_has_one_source_and_one_shape():
    with pytest.raises(ValueError, match=naming("behaviour_log_prob", "source", "policy")):
        amago.ExtraField("behaviour_log_prob", rows="T", source="policy")
    with pytest.raises(ValueError, match=naming("mine", "source", "behaviour")):
        amago.ExtraField("mine", rows="T", source="behaviour")
    with pytest.raises(ValueError, match=naming("behaviour_log_prob", "shape", (2,))):
        amago.ExtraField("behaviour_log_prob", rows="T", shape=(2,), source="behaviour")
    with pytest.raises(ValueError, match=naming("extra_fields[0]", "'log_probs'", "'log_prob'")):
        amago.loading.dataset.check_extra_fields(["log_probs"])


def test_retrace_trains_and_asks_for_its_field(tmp_path):
    config.bind({"Agent.targets": "retrace"})
    with pytest.raises(SettingsError, match=naming("Agent", "extra_fields", "behaviour_log_prob")):
        tiny.started(tmp_path / "a")
    e = tiny.learned(tmp_path / "b", extra_fields=["behaviour_log_prob"])
    assert e.updater.grad_steps == 2
    values = {name: v for row in tiny.rows(e.run_dir, "train") for name, v in row["values"].items()}
    assert 0.0 < values["Trace Coefficient (main gamma)"] < 0.95
