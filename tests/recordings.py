"""A small recording in which every number says where it belongs, written in each format that can be read."""

import warnings
from dataclasses import dataclass

import gymnasium as gym
import numpy as np

OBS = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
ACT = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
LIMIT = 6
"""The time limit: who has not terminated by then is cut."""


@dataclass
class Episode:
    """obs[t] = [number, t]; rewards are irregular; ``cut``: by the time limit."""

    number: int
    rewards: np.ndarray
    terminated: bool
    cut: bool

    def __len__(self):
        return len(self.rewards)

    @property
    def obs(self):
        return np.array([[self.number, t] for t in range(len(self) + 1)], np.float32)

    @property
    def actions(self):
        return np.array([[action(self.number, t)] for t in range(len(self))], np.float32)

    @property
    def terminations(self):
        return np.arange(len(self)) == (len(self) - 1 if self.terminated else -1)

    @property
    def truncations(self):
        return np.arange(len(self)) == (len(self) - 1 if self.cut else -1)


def action(number, t):
    return np.float32(np.sin(7 * number + t))


def record(seed=0):
    """Terminated early, cut, both at once, one step long, cut again, and at last one that just stops."""
    rng = np.random.default_rng(seed)
    plan = [
        (3, True, False), (6, False, True), (6, True, True), (1, True, False), (6, False, True), (5, True, False),
        (4, False, False),
    ]  # fmt: skip
    return [Episode(i, rng.normal(size=n).astype(np.float32), *ends) for i, (n, *ends) in enumerate(plan)]


def rows(episodes, next_observations=False, truncations="truncations", terminations="terminations"):
    """The episodes as flat arrays."""
    out = {
        "observations": np.concatenate([e.obs[:-1] for e in episodes]),
        "actions": np.concatenate([e.actions for e in episodes]),
        "rewards": np.concatenate([e.rewards for e in episodes]),
        terminations: np.concatenate([e.terminations for e in episodes]),
    }
    if truncations:
        out[truncations] = np.concatenate([e.truncations for e in episodes])
    if next_observations:
        out["next_observations"] = np.concatenate([e.obs[1:] for e in episodes])
    return out


def write_hdf5(path, episodes, timeouts=True, next_observations=False):
    import h5py

    with h5py.File(path, "w") as file:
        for name, a in rows(episodes, next_observations, "timeouts" if timeouts else None, "terminals").items():
            file.create_dataset(name, data=a, compression="gzip")
        file.create_dataset("infos/qpos", data=np.zeros((3, 2)))
        file.create_dataset("metadata/algorithm", data="SAC")
    return path


def write_minari(dataset_id, episodes, obs_space=OBS, act_space=ACT):
    from minari.data_collector import EpisodeBuffer

    fields = ("actions", "rewards", "terminations", "truncations")
    buffers = [EpisodeBuffer(observations=e.obs, **{f: getattr(e, f) for f in fields}) for e in episodes]
    return write_buffers(dataset_id, buffers, obs_space, act_space)


def write_buffers(dataset_id, buffers, obs_space, act_space):
    """Without the warnings that author and so on are not given."""
    import minari

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="minari")
        return minari.create_dataset_from_buffers(
            dataset_id, buffers, observation_space=obs_space, action_space=act_space, jpeg_encoding=False
        )
