"""Shaping by the last reward, against returns summed one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amago.data.trajectory import FrozenTraj, rl2
from amago.relabeling import LastRewardShaping


def rollout(rewards, done=False, before=0.0):
    """A rollout, or a piece of one that begins with the reward ``before``, with these rewards."""
    t = len(rewards)
    rews = np.array(rewards, np.float32)[:, None]
    dones = np.zeros((t, 1), bool)
    dones[-1] = done
    observed = rl2(np.concatenate(([[before]], rews)), np.zeros((t + 1, 2), np.float32))
    obs = {"observation": np.arange(t + 1, dtype=np.float32)[:, None]}
    return FrozenTraj(obs, observed, np.arange(t + 1)[:, None], rews, dones, np.zeros((t, 2), np.float32))


@given(
    st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=20), st.booleans(), st.sampled_from([0.0, 0.5, 0.97]),
    st.sampled_from([None, 0.0, 2.0]), st.floats(-10, 10, width=32),
)  # fmt: skip
def test_returns_change_by_the_potentials_of_both_ends(rewards, done, gamma, coeff, before):
    traj = rollout(rewards, done, before)
    new = LastRewardShaping(gamma, coeff)(traj)
    c = 1 / (1 - gamma) if coeff is None else coeff
    for start in range(len(rewards)):
        discounts = gamma ** np.arange(len(rewards) - start)
        change = (discounts * (new.rews - traj.rews)[start:, 0]).sum()
        end = 0.0 if done else gamma ** (len(rewards) - start) * c * rewards[-1]
        first = before if start == 0 else rewards[start - 1]
        assert change == pytest.approx(end - c * first, abs=2e-2)
