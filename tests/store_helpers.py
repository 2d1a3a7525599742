"""Trajectories whose every number says where it belongs, and shorthand for writers and stores."""

from contextlib import closing

import gymnasium as gym
import numpy as np
from counting_env import check_traj, length_of

from amago.data.trajectory import StoredTraj
from amago.store import TrajectoryStore, TrajectoryWriter

ACTIONS = gym.spaces.Discrete(100_000)
OBS = gym.spaces.Dict(
    {"a/b": gym.spaces.Box(-np.inf, np.inf, (3,), np.float32), "image": gym.spaces.Box(0, 255, (2, 2, 3), np.uint8)}
)
KINDS = ("segments", "npz", "npz-compressed")


def numbered(episode: int, steps: int, start_time: int = 0, env_name: str = "counting") -> StoredTraj:
    """Observation t says (episode, t, start_time); action t is t, reward t is 1000 episode + t."""
    t = np.arange(steps + 1)
    first = np.stack([np.full(steps + 1, episode), t, np.full(steps + 1, start_time)], axis=1).astype(np.float32)
    image = np.broadcast_to((t % 251).astype(np.uint8)[:, None, None, None], (steps + 1, 2, 2, 3)).copy()
    return StoredTraj(
        obs={"a/b": first, "image": image},
        actions=t[:steps, None].astype(np.int64),
        rews=(1000 * episode + t[:steps, None]).astype(np.float32),
        dones=(t[:steps, None] == steps - 1),
        start_time=start_time,
        prev_reward=0.5 * start_time,
        prev_action=np.array([start_time], np.int64),
        env_name=env_name,
    )


def writer(root, name="w", save_as="segments", part="fifo", **kwargs) -> TrajectoryWriter:
    kwargs = {"action_space": ACTIONS, "obs_space": OBS, "save_as": save_as} | kwargs
    return TrajectoryWriter(root / part, writer=name, **kwargs)


FEW = gym.spaces.Discrete(50)


def add(root, lengths, first=0, names=("counting",), save_as="npz", writer="w", part="fifo"):
    """Episodes of these lengths in the buffer of `dataset_of`, numbered from ``first``, of environments in turn."""
    with TrajectoryWriter(root / "d" / "buffer" / part, writer=writer, action_space=FEW, obs_space=OBS, save_as=save_as) as w:
        for i, steps in enumerate(lengths, first):
            traj = numbered(i, steps, env_name=names[i % len(names)])
            traj.actions %= FEW.n
            w.write(traj)


def dataset_of(root, max_seq_len=8, padded="none", cut_short=False, **options):
    """A `DiskTrajDataset`, opened."""
    from amago.loading import DatasetSettings, DiskTrajDataset

    dataset = DiskTrajDataset(root, "d", **options)
    dataset.configure(DatasetSettings(max_seq_len, padded, cut_short_trajectories=cut_short))
    return dataset


def put(root, episodes, name="w", save_as="segments", part="fifo", steps=4, **kwargs):
    """One file (npz: several) of the given episodes; returns the writer's directory."""
    with writer(root, name, save_as, part, **kwargs) as w:
        for episode in episodes:
            w.write(numbered(episode, steps))
    return root / part


def one_file(root, save_as="segments"):
    """A file of one trajectory, or a segment of two."""
    [path] = put(root, [7] if save_as != "segments" else [7, 8], save_as=save_as, steps=6).iterdir()
    return path


def opened(root, *args, **kwargs) -> TrajectoryStore:
    store = TrajectoryStore(root, *args, **kwargs)
    store.refresh()
    return store


def stored(root) -> list[StoredTraj]:
    """The trajectories of a buffer."""
    with closing(opened(root)) as store:
        return [store.read(i) for i in range(len(store))]


def whole_episodes(root) -> list[tuple[int, int]]:
    """Actor and episode of every trajectory of a `CountingEnv`; each must be whole and end as its environment did."""
    found = [check_traj(traj, "discrete") for traj in stored(root)]
    assert all((begin, n) == (0, length_of(actor, episode)) for actor, episode, begin, n in found), (
        "unfinished ones are recorded"
    )
    return [(actor, episode) for actor, episode, *_ in found]


def episodes(store) -> list[int]:
    """The episodes in the store, in the order of their indices."""
    return [int(store.read(i, 0, 1, keys=["a/b"]).obs["a/b"][0, 0]) for i in range(len(store))]


def assert_same(a: StoredTraj, b: StoredTraj) -> None:
    """Equal to the last bit, dtypes included."""
    assert sorted(a.obs) == sorted(b.obs)
    pairs = [(a.obs[k], b.obs[k]) for k in a.obs] + [(getattr(a, f), getattr(b, f)) for f in ("actions", "rews", "dones")]
    for x, y in [*pairs, (np.float32(a.prev_reward), np.float32(b.prev_reward)), (a.prev_action, b.prev_action)]:
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert x.tobytes() == y.tobytes()  # NaN and -0.0 count too
    assert (a.start_time, a.env_name) == (b.start_time, b.env_name)


def assert_numbered(traj: StoredTraj, start: int = 0) -> int:
    """Check every number of a slice that begins at ``start`` of a `numbered` trajectory; returns its episode."""
    n, episode, began = len(traj), int(traj.obs["a/b"][0, 0]), int(traj.obs["a/b"][0, 2])
    t = np.arange(start, start + n + 1)
    np.testing.assert_array_equal(traj.obs["a/b"], np.stack([np.full(n + 1, episode), t, np.full(n + 1, began)], axis=1))
    np.testing.assert_array_equal(traj.obs["image"], np.broadcast_to((t % 251)[:, None, None, None], (n + 1, 2, 2, 3)))
    np.testing.assert_array_equal(traj.actions[:, 0], t[:-1])
    np.testing.assert_array_equal(traj.rews[:, 0], 1000 * episode + t[:-1])
    assert traj.start_time == began + start
    assert traj.prev_reward == (1000 * episode + start - 1 if start else 0.5 * began)
    assert traj.prev_action.tolist() == [start - 1 if start else began]
    return episode


def steps_of(episode: int) -> int:
    """A length from 1 to 300 that differs from episode to episode, for writers in other processes."""
    return 1 + episode * 7919 % 300
