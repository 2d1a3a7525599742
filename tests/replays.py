"""Rollouts played with given actions, and their comparison."""

import numpy as np

from amago.hindsight import TrajectoryBuilder
from amago.spaces import action_spec


def played(env, obs, actions):
    """What is recorded of a rollout that begins with ``obs``, until it ends or the actions do."""
    traj = TrajectoryBuilder(action_spec(env.action_space), "played").start(obs)
    for action in actions:
        obs, reward, terminated, _, _ = env.step(action)
        traj.add(int(action), reward, terminated, obs)
        if terminated:
            break
    return traj.freeze()


def check_equal(a, b):
    assert a.obs.keys() == b.obs.keys()
    for key in a.obs:
        np.testing.assert_array_equal(a.obs[key], b.obs[key], err_msg=key)
    for name in ("rl2s", "time_idxs", "rews", "dones", "actions"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        np.testing.assert_array_equal(x, y, err_msg=name)
