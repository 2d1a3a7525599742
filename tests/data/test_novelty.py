"""The novelty bonus against a plain count of what was observed."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import check_refused, naming, refused

from amago.data.trajectory import FrozenTraj
from amago.relabeling import LastRewardShaping, NoveltyRelabeler


def walk(places, rewards=None, clock=False):
    """A rollout through places on a line, with a reward for each step."""
    t = len(places) - 1
    rews = np.zeros(t) if rewards is None else np.asarray(rewards)
    obs = {"at": np.asarray(places, np.float32)[:, None]}
    if clock:
        obs["clock"] = np.arange(t + 1, dtype=np.int64)[:, None]
    return FrozenTraj(
        obs=obs, rl2s=np.zeros((t + 1, 3), np.float32), time_idxs=np.arange(t + 1)[:, None], rews=rews.astype(np.float32)[:, None],
        dones=np.zeros((t, 1), bool), actions=np.zeros((t, 2), np.float32),
    )  # fmt: skip


@given(st.lists(st.integers(0, 3), min_size=2, max_size=20), st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 2))
def test_the_bonus_falls_with_the_visits_to_what_a_step_leads_to(places, decay, coeff):
    rewards = np.linspace(-1, 1, len(places) - 1)
    traj = walk(places, rewards)
    before, inputs = traj.rews.copy(), traj.rl2s.copy()
    new = NoveltyRelabeler(coeff, decay)(traj)
    seen = Counter(places[:1])
    for t, place in enumerate(places[1:]):
        seen[place] += 1
        assert new.rews[t, 0] == pytest.approx(rewards[t] + coeff * seen[place] ** -decay, abs=1e-5)
    assert np.array_equal(traj.rews, before), "the stored rewards stay"
    assert np.array_equal(new.rl2s, inputs), "what the policy sees stays"


def test_what_is_new_alone():
    new = NoveltyRelabeler(0.5, float("inf")).relabel(walk([0, 1, 1, 0, 2]))
    assert new.rews[:, 0].tolist() == [0.5, 0, 0, 0.5]


def test_a_clock_is_left_out_and_near_numbers_are_the_same():
    assert NoveltyRelabeler(1.0, np.inf)(walk([0, 0, 0], clock=True)).rews.sum() == 2
    assert NoveltyRelabeler(1.0, np.inf, keys=["at"])(walk([0, 0, 0], clock=True)).rews.sum() == 0
    near = walk([0.0, 0.04, 0.4, 0.44, -0.04])
    assert NoveltyRelabeler(1.0, np.inf).relabel(near).rews.sum() == 4
    assert NoveltyRelabeler(1.0, np.inf, resolution=0.25).relabel(near).rews[:, 0].tolist() == [0, 1, 0, 0]


def test_chosen_numbers_are_counted_in_the_order_of_the_keys():
    traj = walk([0, 0, 1], clock=True)
    assert NoveltyRelabeler(1.0, np.inf, features=[0]).relabel(traj).rews[:, 0].tolist() == [0, 1], "alphabetical: at, clock"
    assert NoveltyRelabeler(1.0, np.inf, features=[1]).relabel(traj).rews[:, 0].tolist() == [1, 1]
    assert NoveltyRelabeler(1.0, np.inf, keys=["clock", "at"], features=[1]).relabel(traj).rews[:, 0].tolist() == [0, 1]
    with refused(ValueError, "features has 2, but the observations that are counted have 2 numbers"):
        NoveltyRelabeler(features=[0, 2]).relabel(traj)


def test_wrong_settings_are_refused_by_name():
    wrong = [("coeff", -0.1), ("coeff", np.inf), ("decay", -1.0), ("keys", "at"), ("resolution", 0.0), ("features", [0, -1])]
    check_refused(
        ValueError,
        *((naming(name), lambda name=name, value=value: NoveltyRelabeler(**{name: value})) for name, value in wrong),
        *(
            (name, lambda name=name, value=value: LastRewardShaping(**{name: value}))
            for name, value in (("gamma", 1.0), ("coeff", -1.0))
        ),
        (naming("'there'", ["at"]), lambda: NoveltyRelabeler(keys=["there"])(walk([0, 1]))),
    )
