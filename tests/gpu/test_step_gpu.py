"""Steps of the policy as CUDA graphs: actions, random numbers, resets and memory are those of ordinary steps, to the bit on a simulated device."""

import itertools
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from gpu.devices import CUDA, SIMULATED, count_replays

from amago.envs import AMAGOEnv, make_pool
from amago.nets.kv_cache import KVCache
from amago.nets.traj_encoders import GRUTrajEncoder
from amago.run.rollout import Rollout

pytestmark = pytest.mark.parametrize("device", [CUDA], indirect=True)


class Fresh(GRUTrajEncoder):
    """Returns a new hidden state each step."""

    def forward(self, seq, time_idxs, hidden_state=None, log_dict=None):
        return super().forward(seq, time_idxs, hidden_state.clone())


class Counter(Fresh):
    """Counts on the host."""

    def init_hidden_state(self, batch_size, device):
        return super().init_hidden_state(batch_size, device), 0

    def reset_hidden_state(self, hidden_state, dones):
        return super().reset_hidden_state(hidden_state[0], dones), hidden_state[1]

    def forward(self, seq, time_idxs, hidden_state=None, log_dict=None):
        out, memory = super().forward(seq, time_idxs, hidden_state[0])
        return out * (1 + hidden_state[1]), (memory, 1 - hidden_state[1])


def pendulum(steps):
    return AMAGOEnv(gym.make("Pendulum-v1", max_episode_steps=steps), env_name="Pendulum")


ENVS = {
    "discrete": [tiny.cartpole] * 5,
    "continuous": [partial(pendulum, n) for n in range(4, 9)],
    "multibinary": [tiny.bits] * 5,
}


@pytest.fixture
def replays(monkeypatch):
    """The replays so far. Ordinary steps of a transformer read every slot of its cache, too: in sums of fewer terms rounding differs."""

    def advance(cache):
        cache.host_lengths[:] = cache.capacity
        return original(cache)

    original = KVCache.advance
    monkeypatch.setattr(KVCache, "advance", advance)
    return count_replays(monkeypatch)


def assert_same(found, expected, near=1e-3):
    """To the bit on a simulated device, elsewhere but for rounding."""
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=0.0 if SIMULATED else near)


def acted(traj, device, makers, runs, graphs, **options):
    """What actors saw and did in runs of some steps, (steps, actors, ...). In the first run an optimizer steps, and weights are loaded."""
    agent = tiny.agent(makers[0](), traj, max_seq_len=9).to(device)
    pool = make_pool(makers, env_mode="sync", seed=0, parallel_actors=len(makers))
    rollout = Rollout(pool, device, cuda_graphs=graphs, **options)
    optimizer, start, seen = torch.optim.SGD(agent.parameters(), 0.3), {}, []

    def after_step(_):
        seen.append(np.concatenate((*pool.obs.values(), pool.rl2s), axis=1))
        if len(seen) == 7:
            start.update({name: x.clone() for name, x in agent.state_dict().items()})
            for p in agent.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        elif len(seen) == 15:
            agent.load_state_dict(start)

    torch.manual_seed(2)
    rollout.reset()
    for sample, steps in runs:
        rollout.run(agent, steps, sample, on_step=after_step)
    pool.close()
    return np.stack(seen)


@pytest.mark.parametrize("traj", ["ff", "transformer", "gru", "mingru", "mamba"])
@pytest.mark.parametrize("actions", ENVS)
def test_replayed_steps_equal_ordinary_ones(actions, traj, device, replays, caplog):
    runs = [(True, 24), (False, 12)]
    ordinary, graphs = (acted(traj, device, ENVS[actions], runs, on) for on in (False, True))
    assert len(replays) == 21 - 2 + 9  # without the steps after new weights
    assert "failed" not in caplog.text
    assert (ordinary[1:] != ordinary[:-1]).any(axis=(1, 2)).all()
    assert_same(graphs, ordinary)


@pytest.mark.parametrize("traj", ["transformer", "mamba"])
def test_mixed_precision(traj, device, replays):
    ordinary, graphs = (
        acted(traj, device, ENVS["continuous"], [(True, 24)], on, autocast=lambda: torch.autocast("cuda", torch.bfloat16))
        for on in (False, True)
    )
    assert len(replays) == 21 - 2
    assert_same(graphs, ordinary)


@pytest.mark.parametrize("traj", ["transformer", "gru", Fresh])
def test_each_group_of_actors_has_a_graph(traj, device, replays):
    """Groups of two and three actors, and steps of all five."""
    agent, found = tiny.agent(tiny.pendulum(), traj, max_seq_len=9).to(device), []
    for graphs in (False, True):
        pool = make_pool(ENVS["continuous"], env_mode="async", workers=2, seed=0, parallel_actors=5)
        rollout, joint = Rollout(pool, device, cuda_graphs=graphs), itertools.cycle([True, True, False, False, True, False])
        rollout.timing.joint = partial(next, joint)
        rollout.reset()
        for steps in (11, 12, 13):
            rollout.run(agent, steps, sample=False)
            found.append(np.concatenate((*pool.obs.values(), pool.rl2s), axis=1))
        pool.close()
    assert len({id(graph) for graph, *_ in replays}) == (6 if traj is Fresh else 9)
    assert_same(found[3:], found[:3])


def test_a_memory_on_the_host_takes_ordinary_steps(device, replays, caplog):
    ordinary, graphs = (acted(Counter, device, ENVS["continuous"], [(True, 20)] * 2, on) for on in (False, True))
    assert not replays
    assert caplog.text.count("steps of the policy are not replayed as CUDA graphs") == 1
    assert_same(graphs, ordinary)


def test_a_run_collects_and_evaluates_by_graphs(tmp_path, device, replays):
    options = {
        "train_timesteps_per_epoch": 24,
        "val_interval": 1,
        "val_timesteps_per_epoch": 14,
        "epochs": 2,
        "log_interval": 1,
    }
    ordinary, graphs = (
        tiny.learned(tmp_path / str(on), tiny.tmaze, "transformer", cuda_graphs=on, max_seq_len=8, **options)
        for on in (False, True)
    )
    assert len(replays) == 2 * (21 + 11)
    torch.testing.assert_close(*map(tiny.weights, (ordinary, graphs)), rtol=1e-4, atol=1e-5)
    wanted, found = ([(x.actor, x.ret, x.length) for x in e.phase_statistics.episodes] for e in (ordinary, graphs))
    assert found == wanted != []
