"""Trajectory files as the original system writes them, made from what its documentation says of them."""

import numpy as np


def arrays(actions, seed=0, start=0, obs=None):
    """The arrays of a trajectory with these action vectors (T, A)."""
    rng, t = np.random.default_rng(seed), len(actions)
    rews = rng.normal(size=(t, 1)).astype(np.float32)
    before = np.zeros((1, 1 + actions.shape[1]), np.float32) if start == 0 else rng.normal(size=(1, 1)) * np.ones((1, 1))
    if start:
        before = np.concatenate((before, actions[:1]), axis=1).astype(np.float32)
    found = {"observation": rng.normal(size=(t + 1, 3)).astype(np.float32)} if obs is None else obs(rng, t)
    return {
        "rl2s": np.concatenate((before, np.concatenate((rews, actions), axis=1, dtype=np.float32))),
        "time_idxs": np.arange(start, start + t + 1)[:, None],
        "rews": rews,
        "dones": np.arange(t)[:, None] == t - 1,
        "actions": actions.astype(np.float32),
    } | {f"_OBS_KEY_{k}": v for k, v in found.items()}


def one_hot(indices, n):
    return np.eye(n, dtype=np.float32)[np.asarray(indices)]


def write(directory, content, number=0, env="Env", save=np.savez):
    """A file of the buffer; ``number`` gives the hexadecimal digits and the time."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{env}_{number:08x}_{1_700_000_000.25 + number}.npz"
    save(path, **content)
    return path
