"""Groups of actors that act together or take turns: whichever is faster, and the same actions either way."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch

from amago import config
from amago.agent import Agent
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, MambaTrajEncoder, TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.run import group_timing as pace
from amago.run.group_timing import Pace
from amago.run.rollout import Rollout
from amago.spaces import action_spec, rl2_space

SPACE = gym.spaces.Box(-1.0, 1.0, (2,))
OBS = gym.spaces.Dict({"observation": gym.spaces.Box(-np.inf, np.inf, (3,))})
TINY = {
    "FFTstepEncoder.d_hidden": 12, "FFTstepEncoder.d_output": 12, "FFTrajEncoder.d_model": 12, "GRUTrajEncoder.d_hidden": 12,
    "GRUTrajEncoder.d_output": 12, "TformerTrajEncoder.d_model": 16, "TformerTrajEncoder.d_ff": 16, "TformerTrajEncoder.n_heads": 2,
    "TformerTrajEncoder.n_layers": 2, "MambaTrajEncoder.d_model": 8, "MambaTrajEncoder.d_state": 4, "MambaTrajEncoder.n_layers": 2,
    "Actor.d_hidden": 12, "NCritics.d_hidden": 12,
}  # fmt: skip


class Fresh(GRUTrajEncoder):
    """Its memory is a new object each step."""

    def forward(self, seq, time_idxs, hidden_state=None, log_dict=None):
        out, hidden = super().forward(seq, time_idxs, None if hidden_state is None else hidden_state.clone(), log_dict)
        return out, hidden


class Unsliced(GRUTrajEncoder):
    """It does not say how to slice its memory."""

    def slice_hidden_state(self, hidden_state, start, stop):
        raise NotImplementedError("no idea")


MODELS = {
    "ff": FFTrajEncoder, "gru": GRUTrajEncoder, "transformer": TformerTrajEncoder, "mamba": MambaTrajEncoder, "new memory": Fresh,
    "unsliced": Unsliced,
}  # fmt: skip


class Numbers:
    """A pool of five actors in two groups: observations follow from actions, rollouts of different lengths."""

    def __init__(self):
        self.num_actors, self.groups = 5, [slice(0, 2), slice(2, 5)]
        self.observation_space, self.action_spec, self.rl2_space = OBS, action_spec(SPACE), rl2_space(action_spec(SPACE))
        self.obs = {"observation": np.arange(15, dtype=np.float32).reshape(5, 3) / 15}
        self.rl2s, self.time_idxs = np.zeros((5, 3), np.float32), np.zeros((5, 1), np.int64)
        self.resets, self.busy, self.sizes = np.ones(5, bool), [False, False], []
        self.actions = np.zeros((5, 2), np.float32)
        self.log = []

    def send(self, group, actions):
        assert not self.busy[group]
        rows = self.groups[group]
        assert actions.shape == (rows.stop - rows.start, 2)
        self.busy[group], self.actions[rows] = True, actions
        self.log.append((group, actions.copy()))

    def send_all(self, actions):
        assert actions.shape == (5, 2)
        for group, rows in enumerate(self.groups):
            self.send(group, actions[rows])

    def wait(self, group):
        assert self.busy[group]
        self.busy[group], rows = False, self.groups[group]
        actions = self.actions[rows]
        self.time_idxs[rows] += 1
        self.resets[rows] = self.time_idxs[rows, 0] >= np.arange(4, 9)[rows]
        self.time_idxs[rows][self.resets[rows]] = 0
        self.obs["observation"][rows] = (
            np.concatenate((actions, actions[:, :1] * actions[:, 1:]), 1) + 0.1 * self.time_idxs[rows]
        )
        self.rl2s[rows, 1:] = actions * ~self.resets[rows, None]

    def of_each_group(self):
        return [np.stack([a for g, a in self.log if g == group]) for group in range(2)]


def agent(model):
    config.bind(TINY)
    torch.manual_seed(0)
    made = Agent(OBS, rl2_space(action_spec(SPACE)), SPACE, 6, FFTstepEncoder, MODELS[model])
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return made


def paced(monkeypatch, pattern):
    """From now on, `Pace` says what the pattern does, over and over."""
    answers = itertools.cycle(pattern)
    monkeypatch.setattr(Pace, "together", lambda self: next(answers))


@pytest.mark.parametrize("model", MODELS)
def test_actions_do_not_depend_on_the_pace(model, monkeypatch):
    policy, logs, acted = agent(model), {}, {}
    act = policy.get_actions
    for name, pattern in {"turns": [False], "together": [True], "both": [True, True, False, True, False, False, False]}.items():
        paced(monkeypatch, pattern)
        sizes = acted[name] = []
        policy.get_actions = lambda *args, sizes=sizes: sizes.append(len(args[1])) or act(*args)
        pool = Numbers()
        loop = Rollout(pool)
        assert loop.run(policy, 11, sample=False) == 11
        assert loop.run(policy, 12, sample=False) == 12, "memory goes on in the next run"
        assert not any(pool.busy)
        assert len(loop.memory) == 2
        logs[name] = pool.of_each_group()
    del policy.get_actions
    assert set(acted["turns"]) == {2, 3}
    assert set(acted["together"]) == ({2, 3} if model == "unsliced" else {5})
    for name in ("together", "both"):
        for mine, expected in zip(logs[name], logs["turns"]):
            assert len(expected) == 23
            assert np.ptp(expected, axis=0).max() > 0.05
            np.testing.assert_allclose(mine, expected, rtol=1e-3, atol=1e-4)


def test_memory_from_outside_is_taken_in_turns(monkeypatch):
    policy = agent("gru")
    paced(monkeypatch, [True])
    pool = Numbers()
    loop = Rollout(pool)
    loop.run(policy, 2, sample=False)
    loop.memory = [policy.init_hidden_state(n, "cpu") + 0.5 for n in (2, 3)]
    given = [m.clone() for m in loop.memory]
    pool.resets[:] = False
    loop.run(policy, 1, sample=False)
    assert all(not torch.equal(a, b) for a, b in zip(loop.memory, given)), "it is what acted"
    assert [m.shape[1] for m in loop.memory] == [2, 3]
    loop.memory = None
    loop.run(policy, 1, sample=False)
    assert [m.shape[1] for m in loop.memory] == [2, 3]


def test_what_must_repeat_takes_turns(monkeypatch):
    policy = agent("gru")
    paced(monkeypatch, [True])
    act, sizes = policy.get_actions, []
    policy.get_actions = lambda *args: sizes.append(len(args[1])) or act(*args)
    Rollout(Numbers(), repeatable=True).run(policy, 6, sample=True)
    assert sizes == [2, 3] * 6


def steps(made, costs, number):
    """Whether each of so many steps is together, if a step costs ``costs[together]``."""
    out = []
    for _ in range(number):
        out.append(made.together())
        steps.now += costs[out[-1]]
    return out


@pytest.fixture
def clock(monkeypatch):
    steps.now = 1.0
    monkeypatch.setattr(pace.time, "perf_counter", lambda: steps.now)


TRIED = Pace.SKIPPED + Pace.TIMED


@pytest.mark.parametrize("better", [False, True])
def test_each_is_tried_and_the_faster_goes_on(clock, better):
    out = steps(Pace(), {better: 1.0, (not better): 1.5}, 100)
    assert out[:TRIED] == [False] * TRIED
    assert out[TRIED : 2 * TRIED + 1] == [True] * (TRIED + 1)
    assert out[2 * TRIED + 2 :] == [better] * (100 - 2 * TRIED - 2)


def test_they_are_tried_again_now_and_then(clock):
    made = Pace()
    assert steps(made, {False: 1.0, True: 1.5}, Pace.EVERY)[-1] is False
    out = steps(made, {False: 1.5, True: 1.0}, 2 * TRIED + 200)
    assert out[-1] is True, "what was slower is faster now"
    assert sum(steps(made, {False: 1.5, True: 1.0}, 10 * Pace.EVERY)) > 0.98 * 10 * Pace.EVERY


@pytest.mark.parametrize("length", [1, 3, 7])
def test_short_runs_are_a_trial_together(clock, length):
    made, out = Pace(), []
    for _ in range(200 // length):
        made.begin()
        out += steps(made, {False: 1.0, True: 0.5}, length)
        steps.now += 1000.0  # an update
    assert (True in out) == (length > 1), "of single steps nobody knows how long they take"
    assert out[-1] is (length > 1)


def test_one_slow_step_decides_nothing(clock):
    made, out = Pace(), []
    for i in range(60):
        out.append(made.together())
        steps.now += 100.0 if i == 7 else (1.5 if out[-1] else 1.0)
    assert not out[-1]
