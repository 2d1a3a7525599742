"""Trajectories, and the batches that they become."""

from collections import Counter

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import check_refused, naming, refused

from amago.data.batch import subsequence
from amago.data.trajectory import FrozenTraj
from amago.hindsight import TrajectoryBuilder
from amago.loading import Batch, RLData, collate
from amago.relabeling import NoOpRelabeler, Relabeler
from amago.spaces import action_spec

SPEC = action_spec(gym.spaces.Discrete(3, start=1))


def rollout(steps=4, terminated=True):
    traj = TrajectoryBuilder(SPEC, env_name="count").start({"observation": np.array([0.0], np.float32)})
    for t in range(steps):
        obs = {"observation": np.array([t + 1.0], np.float32)}
        traj.add(1 + t % 3, reward=float(t + 1), terminated=terminated and t == steps - 1, obs=obs)
    return traj


def test_rl2s_hold_the_reward_that_arrived_with_the_observation_and_the_action_that_caused_it():
    frozen = rollout().freeze()
    np.testing.assert_array_equal(frozen.rl2s[0], 0)
    for t in range(1, 5):
        assert (frozen.rl2s[t, 0], frozen.rl2s[t, 1:].argmax()) == (t, (t - 1) % 3)
        assert frozen.obs["observation"][t] == t
    np.testing.assert_array_equal(frozen.time_idxs[:, 0], range(5))
    np.testing.assert_array_equal(frozen.dones[:, 0], [False, False, False, True])


def test_wrong_numbers_of_rows_and_steps_out_of_order_are_refused():
    short = rollout().freeze()
    short.dones = short.dones[:-1]
    check_refused(
        ValueError,
        (naming("start(", "add("), lambda: TrajectoryBuilder(SPEC).add(1, 0.0, False, {"observation": np.zeros(1)})),
        (naming("terminated", "start("), lambda: rollout().add(1, 0.0, False, {"observation": np.zeros(1)})),
        (naming("dones", 3, 4), short.validate),
        ("at least one transition", lambda: TrajectoryBuilder(SPEC).start({"observation": np.zeros(1)}).freeze()),
    )


def test_relabelers_are_checked():
    class Broken(Relabeler):
        def relabel(self, traj: FrozenTraj) -> FrozenTraj:
            traj.rews = traj.rews[:2]
            return traj

    traj = rollout().freeze()
    assert NoOpRelabeler()(traj) is traj
    with refused(ValueError, "rows", 5, 2, 3):
        Broken()(traj)


def sequence(length, fill=1.0):
    return RLData(
        obs={"a": torch.full((length + 1, 2), fill), "img": torch.full((length + 1, 2, 2, 1), 7, dtype=torch.uint8)},
        rl2s=torch.full((length + 1, 3), fill), time_idxs=torch.arange(length + 1)[:, None], rews=torch.full((length, 1), fill),
        dones=torch.zeros(length, 1, dtype=torch.bool), actions=torch.full((length, 2), fill),
    )  # fmt: skip


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_the_mask_says_what_is_real(lengths):
    batch = collate([sequence(n) for n in lengths])
    longest = max(lengths)
    assert batch.mask.shape == (len(lengths), longest + 1, 1)
    for i, n in enumerate(lengths):
        assert batch.mask[i, :, 0].tolist() == [True] * (n + 1) + [False] * (longest - n)
        assert (batch.transition_mask[i].sum(), batch.rews[i, :n].sum()) == (n, n)
        assert batch.obs["a"][i, : n + 1].eq(1).all()
    assert (batch.obs["img"].dtype, batch.dones.dtype) == (torch.uint8, torch.bool)


L = 4


@pytest.mark.parametrize("cut_short", [False, True])
@pytest.mark.parametrize("length", [1, L - 1, L, 10])
@pytest.mark.parametrize("padded", ["none", "both", "left", "right"])
def test_windows_are_uniform_over_the_documented_starts(padded, length, cut_short):
    ends = {"none": (0, length - L), "both": (1 - L, length - 2), "left": (1 - L, length - L), "right": (0, length - 2)}
    first, last = ends[padded]
    want = Counter((max(s, 0), min(s + L, length)) for s in range(first, max(last, first) + 1))
    if length <= L and not cut_short:
        want = Counter([(0, length)])
    rng, draws = np.random.default_rng(0), 3000
    seen = Counter(subsequence(length, L, padded, rng, cut_short) for _ in range(draws))
    assert set(seen) == set(want)
    for window, share in want.items():
        p = share / want.total()
        assert abs(seen[window] - draws * p) <= 5 * np.sqrt(draws * p * (1 - p))


def test_what_does_not_fit_is_refused():
    without, real, double = sequence(3), sequence(3), sequence(3)
    without.obs.pop("img")
    real.obs["img"], double.rews = torch.full((4, 2, 2, 1), 0.7), double.rews.double()
    parts = vars(collate([sequence(3)]))
    check_refused(
        ValueError,
        ("no sequences", lambda: collate([])),
        (naming("observations", ["a"], ["a", "img"]), lambda: collate([sequence(3), without])),
        (naming("obs['img']", "torch.uint8", "torch.float32"), lambda: collate([sequence(3), real])),
        (naming("rews", "torch.float64", "torch.float32"), lambda: collate([double, sequence(3)])),
        (naming("Batch.dones", (1, 2, 1), (1, 3, 1)), lambda: Batch(**(parts | {"dones": torch.zeros(1, 2, 1).bool()}))),
    )
    assert Batch(**(parts | {"mask": torch.ones(1, 4, 1)})).mask.dtype == torch.bool
    moved = collate([sequence(2)]).to("meta")
    assert {moved.rews.device.type, moved.obs["a"].device.type, moved.mask.device.type} == {"meta"}
