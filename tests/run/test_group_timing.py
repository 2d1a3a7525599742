"""Groups of actors that are stepped jointly or alternately: whichever is faster, and with the same actions."""

import itertools
from contextlib import closing, contextmanager
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch

from amago.envs import AMAGOEnv, make_pool
from amago.nets.traj_encoders import GRUTrajEncoder
from amago.run.rollout import GroupTiming, Rollout


class Fresh(GRUTrajEncoder):
    """Returns a new hidden state each step."""

    def forward(self, seq, time_idxs, hidden_state=None, log_dict=None):
        out, hidden = super().forward(seq, time_idxs, None if hidden_state is None else hidden_state.clone(), log_dict)
        return out, hidden


class Unsliced(GRUTrajEncoder):
    """Cannot slice its hidden state."""

    def slice_hidden_state(self, hidden_state, start, stop):
        raise NotImplementedError("no idea")


MODELS = {"gru": GRUTrajEncoder, "transformer": tiny.TRAJ["transformer"], "new memory": Fresh, "unsliced": Unsliced}


def agent(model):
    made = tiny.agent(tiny.pendulum(), MODELS[model])
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return made


def pendulum(steps):
    return AMAGOEnv(gym.make("Pendulum-v1", max_episode_steps=steps), env_name="Pendulum")


@contextmanager
def scripted(policy, *pattern, **options):
    """A rollout of five actors in two groups in which a step is joint where a pattern, repeated, says so; and the sizes of its batches."""
    makers = [partial(pendulum, n) for n in range(4, 9)]
    with closing(make_pool(makers, env_mode="async", workers=2, seed=0, parallel_actors=5)) as pool:
        loop, choice, act, sizes = Rollout(pool, **options), itertools.cycle(pattern), type(policy).get_actions, []
        loop.timing.joint = lambda: next(choice)
        policy.get_actions = lambda *args: sizes.append(len(args[1])) or act(policy, *args)
        loop.reset()
        yield loop, sizes


@pytest.mark.parametrize("model", MODELS)
def test_actions_do_not_depend_on_the_timing(model):
    policy, found, acted = agent(model), {}, {}
    for name, pattern in {"turns": [False], "both": [True, True, False, True, False, False, False]}.items():
        with scripted(policy, *pattern) as (loop, sizes):
            seen = []
            for steps in (11, 12):  # memory goes on in the next run
                assert loop.run(policy, steps, sample=False) == steps
                seen.append(np.concatenate((loop.pool.obs["observation"], loop.pool.rl2s), axis=1))
        found[name], acted[name] = np.stack(seen), set(sizes)
    assert acted["turns"] == {2, 3}
    assert acted["both"] == ({2, 3} if model == "unsliced" else {2, 3, 5})
    np.testing.assert_allclose(found["both"], found["turns"], rtol=1e-3, atol=1e-3)


def test_memory_from_outside_is_taken_in_turns():
    policy = agent("gru")
    with scripted(policy, True) as (loop, _):
        loop.run(policy, 2, sample=False)
        memory = [policy.init_hidden_state(group.stop - group.start, "cpu") + 0.5 for group in loop.pool.groups]
        given = [m.clone() for m in memory]
        loop.take_hidden_state(policy, memory)
        loop.run(policy, 1, sample=False)
        assert all(not torch.equal(a, b) for a, b in zip(loop.hidden_state, given)), "it is what acted"
        loop.memory = None
        loop.run(policy, 1, sample=False)
        assert loop.hidden_state.shape[1] == 5, "one memory of all"


def test_what_must_repeat_takes_turns():
    policy = agent("gru")
    with scripted(policy, True, repeatable=True) as (loop, sizes):
        loop.run(policy, 6, sample=True)
    assert set(sizes) == {2, 3}


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
