"""Groups of actors that are stepped jointly or alternately: whichever is faster, and with the same actions."""

import itertools
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch

from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, MambaTrajEncoder, TformerTrajEncoder
from amago.run.rollout import GroupTiming, Rollout
from amago.spaces import action_spec, rl2_space

SPACE = gym.spaces.Box(-1.0, 1.0, (2,))
OBS = gym.spaces.Dict({"observation": gym.spaces.Box(-np.inf, np.inf, (3,))})


class Fresh(GRUTrajEncoder):
    """Returns a new hidden state each step."""

    def forward(self, seq, time_idxs, hidden_state=None, log_dict=None):
        out, hidden = super().forward(seq, time_idxs, None if hidden_state is None else hidden_state.clone(), log_dict)
        return out, hidden


class Unsliced(GRUTrajEncoder):
    """Cannot slice its hidden state."""

    def slice_hidden_state(self, hidden_state, start, stop):
        raise NotImplementedError("no idea")


class SaysSo(Unsliced):
    """Says that it cannot slice its hidden state."""

    def can_slice_hidden_state(self, hidden_state):
        return False


MODELS = {
    "ff": FFTrajEncoder, "gru": GRUTrajEncoder, "transformer": TformerTrajEncoder, "mamba": MambaTrajEncoder, "new memory": Fresh,
    "unsliced": Unsliced, "says so": SaysSo,
}  # fmt: skip


class Numbers:
    """A pool of five actors in two groups: observations follow from actions, rollouts of different lengths."""

    def __init__(self):
        self.num_actors, self.groups = 5, [slice(0, 2), slice(2, 5)]
        self.observation_space, self.action_spec, self.rl2_space = OBS, action_spec(SPACE), rl2_space(action_spec(SPACE))
        self.obs = {"observation": np.arange(15, dtype=np.float32).reshape(5, 3) / 15}
        self.rl2s, self.time_idxs = np.zeros((5, 3), np.float32), np.zeros((5, 1), np.int64)
        self.resets, self.busy, self.sizes = np.ones(5, bool), [False, False], []
        self.actions, self.extras = np.zeros((5, 2), np.float32), {}
        self.log, self.shares_process = [], False

    def send(self, group, actions):
        if group is None:
            assert actions.shape == (5, 2)
            for g, rows in enumerate(self.groups):
                self.send(g, actions[rows])
            return
        assert not self.busy[group]
        rows = self.groups[group]
        assert actions.shape == (rows.stop - rows.start, 2)
        self.busy[group], self.actions[rows] = True, actions
        self.log.append((group, actions.copy()))

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
    spaces = SimpleNamespace(observation_space=OBS, rl2_space=rl2_space(action_spec(SPACE)), action_space=SPACE)
    made = tiny.agent(spaces, MODELS[model], bindings={"TformerTrajEncoder.n_layers": 2})
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return made


def scripted(pool, *pattern, **options):
    """A rollout in which a step is joint where a pattern, repeated, says so."""
    loop, choice = Rollout(pool, **options), itertools.cycle(pattern)
    loop.timing.joint = lambda: next(choice)
    return loop


def sizes_of(policy):
    """The numbers of actors of each call of the policy from now on."""
    act, sizes = type(policy).get_actions, []
    policy.get_actions = lambda *args: sizes.append(len(args[1])) or act(policy, *args)
    return sizes


@pytest.mark.parametrize("model", MODELS)
def test_actions_do_not_depend_on_the_timing(model):
    policy, logs, acted = agent(model), {}, {}
    for name, pattern in {"turns": [False], "together": [True], "both": [True, True, False, True, False, False, False]}.items():
        acted[name] = sizes_of(policy)
        pool = Numbers()
        loop = scripted(pool, *pattern)
        assert loop.run(policy, 11, sample=False) == 11
        assert loop.run(policy, 12, sample=False) == 12, "memory goes on in the next run"
        assert not any(pool.busy)
        logs[name] = pool.of_each_group()
    assert set(acted["turns"]) == {2, 3}
    assert set(acted["together"]) == ({2, 3} if model in ("unsliced", "says so") else {5})
    for name in ("together", "both"):
        for mine, expected in zip(logs[name], logs["turns"]):
            assert len(expected) == 23
            assert np.ptp(expected, axis=0).max() > 0.05
            np.testing.assert_allclose(mine, expected, rtol=1e-3, atol=1e-4)


def test_memory_from_outside_is_taken_in_turns():
    policy = agent("gru")
    pool = Numbers()
    loop = scripted(pool, True)
    loop.run(policy, 2, sample=False)
    memory = [policy.init_hidden_state(n, "cpu") + 0.5 for n in (2, 3)]
    given = [m.clone() for m in memory]
    loop.take_hidden_state(policy, memory)
    pool.resets[:] = False
    loop.run(policy, 1, sample=False)
    assert all(not torch.equal(a, b) for a, b in zip(loop.hidden_state, given)), "it is what acted"
    loop.memory = None
    loop.run(policy, 1, sample=False)
    assert loop.hidden_state.shape[1] == 5, "one memory of all"


def test_what_must_repeat_takes_turns():
    policy = agent("gru")
    sizes = sizes_of(policy)
    scripted(Numbers(), True, repeatable=True).run(policy, 6, sample=True)
    assert sizes == [2, 3] * 6


TRIED = GroupTiming.WARMUP_STEPS + GroupTiming.TIMED_STEPS


@pytest.mark.parametrize("better", [False, True])
def test_each_is_tried_and_the_faster_goes_on(better):
    now, out = [1.0], []
    timing = GroupTiming(lambda: now[0])
    for _ in range(100):
        out.append(timing.joint())
        now[0] += 1.0 if out[-1] == better else 1.5
    assert out[:TRIED] == [False] * TRIED
    assert out[TRIED : 2 * TRIED + 1] == [True] * (TRIED + 1)
    assert out[2 * TRIED + 2 :] == [better] * (100 - 2 * TRIED - 2)
