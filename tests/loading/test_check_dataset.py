"""`amago.check_dataset` passes what trains, and names each fault of what would not."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from messages import check_refused, naming, refused

import amago
from amago.data.findings import CheckError
from amago.hindsight import TrajectoryBuilder
from amago.loading import ArrayDataset, DiskTrajDataset, DoNothingDataset, MixtureOfDatasets, RLData, RLDataset
from amago.spaces import action_spec

SPACES = gym.spaces.Dict(at=gym.spaces.Box(-1.0, 1.0, (2,)), card=gym.spaces.Discrete(3)), gym.spaces.Discrete(4)


class Good(RLDataset):
    """Rollouts of 6 to 20 steps, made when they are asked for; every fault below is one change of it."""

    def steps(self, rng):
        return min(int(rng.integers(6, 21)), self.settings.max_seq_len)

    def sample_random_trajectory(self, rng):
        traj = TrajectoryBuilder(action_spec(SPACES[1])).start(self.observe(rng))
        steps = self.steps(rng)
        for t in range(steps):
            reward = float(rng.normal())
            traj.add(int(rng.integers(4)), reward=reward, terminated=t == steps - 1, obs=self.observe(rng))
        return RLData.from_traj(traj.freeze())

    def observe(self, rng):
        return {"at": rng.uniform(-1, 1, 2).astype(np.float32), "card": np.eye(3, dtype=np.float32)[rng.integers(3)]}


def test_what_trains_passes():
    amago.check_dataset(Good())
    amago.check_dataset(Good(), SPACES)
    amago.check_dataset(Good(), SPACES, max_seq_len=5, samples=3, batch_size=1)


def test_a_buffer_of_a_run(tmp_path):
    for kind, make_env in (("discrete", tiny.cartpole), ("continuous", tiny.pendulum), ("bits", tiny.bits)):
        e = tiny.learned(tmp_path, make_env, name=kind, train_timesteps_per_epoch=60)
        amago.check_dataset(e.dataset, make_env)  # as it is open
        assert e.dataset.ready_for_training, "it stays open"
        e.close()
        files = sorted(p.name for p in e.dataset.buffer_dir.rglob("*"))
        data = DiskTrajDataset(tmp_path, kind, dset_max_size=1)
        amago.check_dataset(data, make_env, max_seq_len=9)
        assert sorted(p.name for p in data.buffer_dir.rglob("*")) == files, "nothing is deleted"


def test_arrays_and_mixtures(tmp_path):
    rng = np.random.default_rng(0)
    obs, actions = rng.uniform(-1, 1, (40, 3)).astype(np.float32), rng.integers(0, 2, 40)
    arrays = {"observations": obs, "actions": actions, "rewards": rng.normal(size=40), "terminations": np.arange(40) % 10 == 9}
    data = ArrayDataset(**arrays, action_space=gym.spaces.Discrete(2))
    amago.check_dataset(data, (gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2)))
    amago.check_dataset(MixtureOfDatasets([Good(), Good()], [0.5, 0.5]), SPACES)


def changed(**methods):
    return type("Bad", (Good,), methods)()


def sample(change):
    """A dataset whose sequences are ``change(the right one)``."""
    return changed(sample_random_trajectory=lambda self, rng: change(Good.sample_random_trajectory(self, rng)))


def with_(**fields):
    """A dataset whose sequences have other fields: functions of the right sequence."""
    return sample(lambda d: replace(d, **{name: f(d) for name, f in fields.items()}))


def put(x, at, value):
    out = x.clone()
    out[at] = value
    return out


def obs(**fields):
    return with_(obs=lambda d: d.obs | {k: f(d.obs[k]) for k, f in fields.items()})


def batch(change):
    def sample_batch(self, rng, batch_size):
        return change(Good.sample_batch(self, rng, batch_size))

    return changed(sample_batch=sample_batch)


def both(d, actions):
    return {"actions": actions, "rl2s": torch.cat((d.rl2s[:, :1], torch.cat((torch.zeros(1, actions.shape[1]), actions))), 1)}


UNSEEDED = np.random.default_rng()
FAULTS = {
    "not configured": (changed(configure=lambda self, settings: None), ("configure()", "super().configure(settings)")),
    "configure": (changed(configure=lambda self, settings: 1 / 0), ("configure()", "ZeroDivisionError", "test_check_dataset.py")),
    "spaces": (changed(check_spaces=lambda self, *spaces: int("x")), ("check_spaces()", "ValueError")),
    "metrics": (changed(on_end_of_collection=lambda self: None), ("on_end_of_collection()", None, "dict of numbers")),
    "not ready": (changed(ready_for_training=False), ("nothing to train on", "ready_for_training", False)),
    "an exception": (sample(lambda d: d.nothing), ("sample_random_trajectory(rng)", "AttributeError", "nothing")),
    "no RLData": (sample(lambda d: vars(d)), ("sample_random_trajectory(rng)", "dict", "RLData")),
    "no tensors": (sample(lambda d: (setattr(d, "rews", d.rews.tolist()), d)[1]), ("rews", "tensor")),
    "too long": (changed(steps=lambda self, rng: 40), (40, "max_seq_len=32")),
    "one observation too few": (with_(obs=lambda d: {k: v[1:] for k, v in d.obs.items()}), ("obs['at']", "transitions")),
    "a missing dimension": (with_(rews=lambda d: d.rews[:, 0]), ("rews", "shape")),
    "rl2s without reward": (with_(rl2s=lambda d: d.rl2s[:, 1:]), ("rl2s", "shape", "5)")),
    "dones as numbers": (with_(dones=lambda d: d.dones.float()), ("dones", "torch.float32", "bool")),
    "times as numbers": (with_(time_idxs=lambda d: d.time_idxs.float()), ("time_idxs", "torch.float32", "int64")),
    "indices": (with_(actions=lambda d: d.actions.long()), ("actions", "torch.int64", "one-hot")),
    "NaN": (obs(at=lambda x: put(x, (2, 1), np.nan)), ("obs['at']", "nan")),
    "an infinite reward": (
        with_(rews=lambda d: put(d.rews, (1, 0), np.inf), rl2s=lambda d: put(d.rl2s, (2, 0), np.inf)), ("rews", "inf"),
    ),
    "time that stands still": (with_(time_idxs=lambda d: d.time_idxs * 0), ("time_idxs", "[0, 0, 0, 0, 0, 0]")),
    "an end in the middle": (with_(dones=lambda d: put(d.dones, 2, True)), ("dones", "transition 2")),
    "reward of the wrong step": (with_(rl2s=lambda d: torch.roll(d.rl2s, 1, 0)), ("rl2s[t + 1] = [rews[t], actions[t]]",)),
    "a reward at the beginning": (with_(rl2s=lambda d: put(d.rl2s, (0, 0), 1.5)), ("rl2s", "begins", "1.5")),
    "keys": (with_(obs=lambda d: {"at": d.obs["at"]}), (["at"], ["at", "card"])),
    "another shape": (obs(at=lambda x: x[:, :1]), ("obs['at']", (1,), (2,))),
    "another dtype": (obs(at=lambda x: x.double()), ("obs['at']", "float64", "float32")),
    "other units": (obs(at=lambda x: x * 255), ("obs['at'] is", "-1 to 1")),
    "two actions at once": (sample(lambda d: replace(d, **both(d, d.actions * 0 + 1))), ("actions", "one-hot", "Discrete(4)")),
    "actions of another width": (sample(lambda d: replace(d, **both(d, d.actions[:, :2]))), ("actions", 2, 4, "Discrete(4)")),
    "its own randomness": (
        changed(sample_random_trajectory=lambda self, rng: Good.sample_random_trajectory(self, UNSEEDED)), ("same rng", "rng"),
    ),
    "no batch": (batch(vars), ("sample_batch(rng, 4)", "dict", "Batch")),
    "a batch of another size": (changed(sample_batch=lambda self, rng, n: Good.sample_batch(self, rng, n + 1)), ("sample_batch(rng, 4)", 5)),
    "padding in front": (batch(lambda b: replace(b, mask=b.mask.flip(1) & (torch.arange(b.mask.shape[1]) > 0)[:, None])), ("mask",)),
    "NaN in a batch": (batch(lambda b: replace(b, rews=b.rews * np.nan)), ("rews of a batch", "NaN")),
    "a state that is no JSON": (changed(state_dict=lambda self: {"at": np.zeros(2)}), ("state_dict()", "JSON", "TypeError")),
    "close": (changed(close=lambda self: 1 / 0), ("close()", "ZeroDivisionError")),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(fault):
    data, named = FAULTS[fault]
    with refused(CheckError, "check_dataset", "Bad", *named) as found:
        amago.check_dataset(data, SPACES)
    assert len(found.value.problems) == (2 if fault in ("one observation too few", "an infinite reward") else 1), found.value


def test_an_empty_buffer_and_what_is_no_dataset(tmp_path):
    with refused(TypeError, "dataset", "RLDataset"):
        amago.check_dataset(tmp_path)
    check_refused(
        CheckError,
        (naming("DiskTrajDataset", "nothing to train on"), lambda: amago.check_dataset(DiskTrajDataset(tmp_path, "empty"))),
        (naming("DoNothingDataset", "nothing to train on"), lambda: amago.check_dataset(DoNothingDataset())),
    )


def test_a_buffer_of_another_environment(tmp_path):
    tiny.learned(tmp_path, tiny.cartpole, train_timesteps_per_epoch=60).close()
    with refused(CheckError, "check_spaces()", "(4,)", "(3,)"):
        amago.check_dataset(DiskTrajDataset(tmp_path, "run"), tiny.pendulum)
