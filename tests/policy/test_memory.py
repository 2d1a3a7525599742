"""Whether a study of memory finds what an agent's memory is for, with agents whose memory is known."""

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from messages import check_refused, naming

from amago import config
from amago.agent.base import BaseAgent
from amago.envs import AMAGO_ENV_LOG_PREFIX, AMAGOEnv
from amago.nets.traj_base import TrajEncoder
from amago.nets.traj_encoders import IdentityTrajEncoder
from amago.nets.tstep_encoders import TstepEncoder
from amago.policy.memory import (
    Estimate,
    MemoryStudy,
    Stages,
    conclusion,
    default_contexts,
    influence,
    plot_memory,
    study_memory,
    table,
)
from amago.policy.playing import FULL, THIS_ATTEMPT, View, play

K, LENGTH = 3, 4


class Cue(gym.Env):
    """A cue of 1 or -1 is shown in the first step of the rollout (``every`` attempt if so asked); each later step of K attempts of
    LENGTH steps pays 1 for action 1 if the cue was 1, and for action 0 otherwise."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, every=False, attempts=K):
        self.every, self.attempts, self.horizon = every, attempts, attempts * LENGTH

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.t = int(self.np_random.choice((-1, 1))), 0
        return self._observe(), {}

    def _observe(self):
        shown = self.t == 0 or (self.every and self.t % LENGTH == 0)
        return np.array([self.cue if shown else 0.0], np.float32)

    def step(self, action):
        reward = float(action == (self.cue + 1) // 2)
        self.t += 1
        info = {}
        if self.attempts > 1 and self.t % LENGTH == 0:
            info = {f"{AMAGO_ENV_LOG_PREFIX} Attempt {self.t // LENGTH - 1} Success": reward}
        return self._observe(), reward, self.t == self.horizon, False, info


class Sight(TstepEncoder):
    """The observation."""

    emb_dim = 1

    def inner_forward(self, obs, rl2s, log_dict=None):
        return obs["observation"]


class Sum(TrajEncoder):
    """The sum of all inputs so far."""

    emb_dim = 1

    def forward(self, seq, time_idxs, hidden_state=None, log_dict=None):
        if hidden_state is None:
            return seq.cumsum(dim=1), None
        hidden_state += seq[:, 0]
        return hidden_state[:, None].clone(), hidden_state

    def init_hidden_state(self, batch_size, device):
        return torch.zeros(batch_size, 1, device=device)

    def reset_hidden_state(self, hidden_state, dones):
        hidden_state[torch.as_tensor(dones)] = 0.0
        return hidden_state


class Sign(BaseAgent):
    """Action 1 where the state is positive, else 0, whatever happens."""

    policy_extras = ("log_prob",)
    trainable_params = ()

    def act(self, state, obs, sample, gamma_idx=None):
        return (state > 0).long()

    def act_with_extras(self, state, obs, sample, names, gamma_idx=None):
        action = self.act(state, obs, sample)
        log_prob = torch.nn.functional.logsigmoid(torch.where(action > 0, state, -state))[:, 0]
        return action, {"log_prob": log_prob}

    def soft_sync_targets(self):
        pass


def lakes(n=4, **options):
    return [AMAGOEnv(Cue(**options), env_name="cue") for _ in range(n)]


def sign_agent(memory, **options):
    env = lakes(1, **options)[0]
    return Sign(env.observation_space, env.rl2_space, Cue.action_space, K * LENGTH, Sight, memory)


def study(memory, episodes=24, contexts=None, **options):
    return study_memory(sign_agent(memory, **options), lakes(**options), episodes, 100, contexts)


def test_returns_are_those_of_the_steps_in_sight():
    """An agent that adds up its observations is right for as long as it sees the cue; else it takes action 0, half of which is right."""
    found = study(Sum, contexts=[3, 6])
    cues = found.returns[View(context=1)] > K * LENGTH / 2  # action 0 is right there
    assert 0 < cues.sum() < 24
    for view, right in (
        (FULL, K * LENGTH),
        (THIS_ATTEMPT, LENGTH),
        (View(context=6), 6),
        (View(context=3), 3),
        (View(context=1), 1),
    ):
        np.testing.assert_array_equal(found.returns[view], np.where(cues, K * LENGTH, right))
    assert found.contexts == [1, 3, 6]
    np.testing.assert_array_equal(found.stages.values[THIS_ATTEMPT][~cues], [[1.0, 0.0, 0.0]] * int((~cues).sum()))
    assert (found.stages.score, found.stages.stage) == ("Attempt # Success", "attempt")


@pytest.mark.parametrize("traj", ["ff", "gru", "lstm", "transformer"])
@pytest.mark.parametrize("sample", [False, True])
def test_a_context_as_long_as_the_rollout_is_all_of_the_memory(traj, sample):
    envs = lakes(3)
    agent = tiny.agent(envs[0], traj, max_seq_len=K * LENGTH)

    def rewards(view):
        return [p.rewards for p in play(agent, envs, [1, 2, 3, 4], 100, view, sample, seed=5)]

    full = rewards(FULL)
    assert [len(r) for r in full] == [K * LENGTH] * 4
    assert rewards(View(context=K * LENGTH)) == full
    assert rewards(FULL) == full
    if traj == "ff":
        assert rewards(View(context=1)) == rewards(THIS_ATTEMPT) == full


def test_rollouts_of_several_lengths_and_limits():
    class Short(Cue):
        def step(self, action):
            obs, reward, terminated, _, info = super().step(action)
            return obs, reward, terminated, self.t == 2 and self.cue > 0, info

    envs = [AMAGOEnv(Short(), env_name="short") for _ in range(3)]
    agent = sign_agent(Sum)
    taken = []
    played = play(agent, envs, range(7), 100, on_step=taken.append)
    lengths = [len(p.rewards) for p in played]
    assert set(lengths) == {2, K * LENGTH}
    assert sum(taken) == sum(lengths)
    assert all(p.ended for p in played)
    cut = play(agent, envs, range(7), 5)
    assert {(len(p.rewards), p.ended) for p in cut} == {(2, True), (5, False)}
    assert [len(p.rewards) > 2 for p in cut] == [n > 2 for n in lengths], "one seed is one task"


def test_wrong_arguments():
    check_refused(
        ValueError,
        (naming("context", 0), lambda: View(context=0)),
        ("this_attempt", lambda: View(context=2, this_attempt=True)),
        (naming("episodes", 1), lambda: study_memory(sign_agent(Sum), lakes(), 1)),
        (naming("context", 0), lambda: study_memory(sign_agent(Sum), lakes(), 2, contexts=[4, 0])),
        ("one row each", lambda: play(tiny.agent(tiny.cartpoles(2)), [tiny.cartpoles(2)], [0], 5)),
    )
    assert [default_contexts(n) for n in (1, 2, 3, 8, 9)] == [[1], [1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


def text(found):
    return "\n".join(conclusion(found))


def test_memory_across_attempts_is_found():
    found = study(Sum)
    said = text(found)
    assert said.startswith("Memory is used: ")
    assert "what earlier attempts showed is used" in said
    assert f"a context of {found.contexts[-1]} steps is not enough" in said, "only the whole rollout is"
    worth = found.gain(FULL, View(context=1))
    assert worth.low > 0
    assert str(worth) in said
    assert str(found.gain(FULL, THIS_ATTEMPT)) in said


def test_memory_within_attempts_is_told_from_memory_across_them():
    found = study(Sum, every=True)
    said = text(found)
    assert said.startswith("Memory is used: ")
    assert "Across attempts: no sign of use" in said
    assert "Within an attempt: memory of the present attempt alone is worth" in said
    assert "the last 4 steps are enough" in said


def test_no_memory_is_told_from_memory():
    found = study(IdentityTrajEncoder)
    said = text(found)
    assert said.startswith("Memory is not used: ")
    assert "no action depends on any step but the current one" in said
    assert "Across attempts" not in said
    assert found.gain(FULL, View(context=1)) == Estimate(0.0, 0.0, 0.0, 0.0, 24)


def test_influence_names_the_step_that_was_shown():
    agent, envs = sign_agent(Sum), lakes(1)
    (kept,) = play(agent, envs, [0], 100, keep_first=True)
    found = influence(agent, kept.steps, kept.attempt_ends, "cpu")
    assert found.share.shape == (K * LENGTH, K * LENGTH)
    np.testing.assert_allclose(found.share.sum(axis=1), 1.0)
    assert np.triu(found.share, 1).sum() == 0, "the future has no influence"
    np.testing.assert_allclose(found.share[5, :6], 1 / 6, err_msg="a sum weighs all steps alike")
    assert found.attempts.tolist() == [i // LENGTH for i in range(K * LENGTH)]
    current, attempt, earlier = found.by_distance()
    assert current + attempt + earlier == pytest.approx(1.0)
    assert earlier > attempt > 0


def attention_of_a_transformer(**bindings):
    config.bind({"TformerTrajEncoder.qk_norm": 50.0, "TformerTrajEncoder.n_heads": 2, **bindings})
    agent = tiny.agent(lakes(1)[0], "transformer", max_seq_len=K * LENGTH)
    return study_memory(agent, lakes(2), episodes=2)


def test_attention_of_each_head_by_lag():
    found = attention_of_a_transformer().attention
    assert found.entropy.shape[1] == 2
    assert found.lags == (0, 1, 2, 4, 8)
    np.testing.assert_allclose(found.weight.sum(axis=-1), 1.0, atol=1e-6)
    assert (found.entropy < found.uniform).all()
    lowered = attention_of_a_transformer(**{"TformerTrajEncoder.qk_norm": 1e-6}).attention
    np.testing.assert_allclose(lowered.entropy, lowered.uniform, atol=1e-4, err_msg="all steps alike")
    n = np.arange(1, K * LENGTH + 1)
    np.testing.assert_allclose(lowered.first, (1 / n).mean(), atol=1e-4)
    np.testing.assert_allclose(lowered.weight[..., 0], (1 / n).mean(), atol=1e-4, err_msg="the present step")


def synthetic(full, none, more=None, broken_off=0):
    values = {FULL: np.asarray(full, float), View(context=1): np.asarray(none, float)} | (more or {})
    n = len(values[FULL])
    parts = Stages("reward per step", "tenth of the rollout", {v: np.zeros((n, 2)) for v in values})
    return MemoryStudy("made up", values, dict.fromkeys(values, np.ones(n)), parts, None, broken_off)


def test_what_is_no_more_than_noise_is_called_so():
    rng = np.random.default_rng(0)
    found = synthetic(rng.normal(size=40), rng.normal(size=40))
    assert text(found).startswith("There is no sign that memory is used: ")
    assert text(synthetic(np.zeros(40), rng.normal(5.0, 1.0, size=40))).startswith("Memory does harm: ")
    assert text(synthetic(rng.normal(5.0, 1.0, size=40), np.zeros(40))).startswith("Memory is used: ")


def test_memory_across_attempts_is_found_where_the_whole_gains_nothing():
    noise = np.random.default_rng(1).normal(size=(2, 40))
    said = text(synthetic(noise[0], noise[1], {THIS_ATTEMPT: noise[0] - 3.0}, broken_off=2))
    assert said.startswith("Memory is used, but ")
    assert "Across attempts: 3 [3, 3] is lost" in said
    assert "How far back" not in said
    assert "2 rollouts were broken off" in said


def test_without_attempts_scores_are_by_time(tmp_path):
    found = study(Sum, attempts=1)
    assert THIS_ATTEMPT not in found.returns
    assert found.stages.stage == "tenth of the rollout"
    assert "attempt" not in text(found) + table(found)
    assert plot_memory(found, tmp_path / "new" / "memory.png").read_bytes().startswith(b"\x89PNG")
