"""Actors whose environment is on a device: what is recorded, and that nothing leaves the device between two writes."""

import sys

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from gpu.device_envs import LENGTHS, ROWS, counting
from gpu.devices import CUDA
from store_helpers import stored

from amago import config
from amago.envs import EpsilonGreedy
from amago.envs.pool import ActorError, make_pool
from amago.nets.traj_encoders import get_traj_encoder_cls

DEVICES = ["cpu", CUDA]
simulated = pytest.mark.skipif("simcuda" not in sys.modules, reason="a simulated device counts copies")


def pool_of(device, path=None, exploration=None, save_every=None, **options):
    recorder = (
        None if path is None else {"save_trajs_to": str(path / "fifo"), "save_trajs_as": "segments", "save_every": save_every}
    )
    found = make_pool(
        counting(device, **options), "already_vectorized", parallel_actors=ROWS, recorder=recorder, exploration=exploration,
        seed=0,
    )  # fmt: skip
    found.reset()
    return found


@pytest.mark.parametrize("save_every", [None, 2])
@pytest.mark.parametrize("device", DEVICES)
def test_every_transition_is_recorded_once(device, save_every, tmp_path):
    """Counts go up by one within a trajectory, its last observation is that of its own rollout, and its actions are those taken."""
    pool, steps = pool_of(device, tmp_path, save_every=save_every), 150
    rng, taken = np.random.default_rng(0), []
    for _ in range(steps):
        taken.append(torch.from_numpy(rng.integers(3, size=(ROWS, 1))))
        pool.step(taken[-1].to(device))
    seen = {key: array.cpu() for key, array in pool.obs.items()}
    stats = pool.drain()
    pool.close()
    assert {key: tuple(array.shape) for key, array in seen.items()} == {
        "count": (ROWS, 2),
        "parity": (ROWS, 2),
        "small": (ROWS, 1),
    }
    assert [len([e for e in stats.episodes if e.actor == row]) for row in range(ROWS)] == [steps // n for n in LENGTHS]
    for e in stats.episodes:
        assert (e.length, e.terminated) == (LENGTHS[e.actor], e.actor % 2 == 1)
        assert e.metrics == {"Last Count": e.length}
    trajs = stored(tmp_path)
    for traj in trajs:
        count = traj.obs["count"]
        assert (np.diff(count[:, 0]) == 1).all()
        assert (count[:, 1] == count[0, 1]).all()
        assert count[0, 0] == traj.start_time
        assert (traj.obs["small"][:, 0] == count[:, 0]).all()
        assert (traj.obs["parity"].argmax(1) == count[:, 0] % 2).all()
        assert (traj.rews[:, 0] == 10 * count[1:, 0] + traj.actions[:, 0]).all()
    assert sum(map(len, trajs)) == sum(e.length for e in stats.episodes) or save_every
    first = [t for t in trajs if t.obs["count"][0].tolist() == [0, 0] and not t.start_time]
    length = 3 if save_every is None else 2
    assert [a[0].item() for a in taken[:length]] in [t.actions[:length, 0].tolist() for t in first]


@pytest.mark.parametrize("device", DEVICES)
def test_exploration_is_on_the_device_and_resumes(device):
    pool = pool_of(device, exploration=EpsilonGreedy)
    zeros = torch.zeros((ROWS, 1), dtype=torch.int64, device=device)

    def rewards(pool, steps=30):
        for _ in range(steps):
            pool.step(zeros)
        return [e.ret for e in pool.drain().episodes]

    assert any(r % 10 for r in rewards(pool))
    state = pool.state_dict()
    assert state["actors"]["0"]["exploration"]["global_step"] == 30
    pool.reset()
    expected = rewards(pool)
    again = pool_of(device, exploration=EpsilonGreedy)
    again.load_state_dict(state)
    again.reset()
    assert rewards(again) == expected
    assert rewards(pool_of(device)) == [sum(10 * t for t in range(1, n + 1)) for n in LENGTHS for _ in range(30 // n)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_number_that_is_not_finite_is_refused(device):
    pool = make_pool(counting(device, poison=4), "already_vectorized", parallel_actors=ROWS, seed=0, max_env_restarts=0)
    pool.reset()
    with pytest.raises(ActorError, match="the reward is NaN or infinite"):
        for _ in range(10):
            pool.step(torch.zeros((ROWS, 1), dtype=torch.int64, device=device))
        pool.drain()


@pytest.mark.parametrize("mode", ["NEXT_STEP", "DISABLED"])
def test_rows_that_are_not_reset_in_the_same_step_are_refused(mode):
    with pytest.raises(ValueError, match="must reset its rows in the step that ends"):
        pool_of("cpu", mode=gym.vector.AutoresetMode[mode])


class Held(EpsilonGreedy):
    def add_exploration_noise(self, action, local_step):
        return np.where(local_step[:, None] == 1, 2, action)


def test_exploration_in_numpy_is_refused():
    with pytest.raises(TypeError, match="Held explores in NumPy"):
        pool_of("cpu", exploration=Held)


@pytest.mark.parametrize("traj", ["gru", "transformer"])
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_a_run(device, traj, tmp_path):
    make = counting(device)
    e = tiny.learned(tmp_path, make, traj, env_mode="already_vectorized", parallel_actors=ROWS, epochs=2, val_interval=1, val_timesteps_per_epoch=20,
                     val_episodes=9)  # fmt: skip
    assert e.DEVICE.type == device.type
    assert e.phase_statistics.episodes
    assert e.actors.train.pool.obs["count"].device.type == device.type


@simulated
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("traj", ["ff", "gru", "mingru", "mamba", "transformer"])
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_no_byte_goes_to_the_host_between_two_writes(device, traj, graphs, tmp_path):
    from simcuda import Recorder, model

    config.bind(tiny.MAMBA)
    e = tiny.started(
        tmp_path, counting(device), env_mode="already_vectorized", parallel_actors=ROWS, traj_encoder_type=get_traj_encoder_cls(traj),
        exploration_wrapper_type=EpsilonGreedy, cuda_graphs=graphs,
    )  # fmt: skip
    rollout = e.actors.train
    rollout.run(e.policy, 5)
    with Recorder() as recorder:
        rollout.run(e.policy, 40)
    found = model.summary(recorder.events)
    assert (found["d2h"], found["syncs"], found["pageable"]) == (0, 0, 0), model.syncs(recorder.events)
    with Recorder() as recorder:
        rollout.run(e.policy, 64)
    found = model.summary(recorder.events)
    assert found["d2h"] > 0
