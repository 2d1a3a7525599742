"""The novelty bonus against a plain count of what was observed."""

from collections import Counter

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import naming

from amago import config
from amago.data.novelty import NoveltyRelabeler, visits
from amago.data.trajectory import FrozenTraj
from amago.loading import DatasetSettings, DiskTrajDataset, SequenceLoader
from amago.spaces import action_spec
from amago.store import TrajectoryWriter


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


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(1, 3))
def test_visits_are_counted(places, width):
    rows = np.repeat(np.array(places)[:, None], width, axis=1)
    seen, expected = Counter(), []
    for place in places:
        seen[place] += 1
        expected.append(seen[place])
    assert visits(rows).tolist() == expected


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
    with pytest.raises(ValueError, match="features has 2, but the observations that are counted have 2 numbers"):
        NoveltyRelabeler(features=[0, 2]).relabel(traj)


def test_a_data_set_learns_from_other_rewards_and_stores_the_same(tmp_path):
    actions, observations = gym.spaces.Discrete(2), gym.spaces.Dict({"at": gym.spaces.Box(0, 9, (1,), np.float32)})
    fifo = tmp_path / "b" / "buffer" / "fifo"
    writer = TrajectoryWriter(fifo, writer="w", action_space=actions, obs_space=observations)
    writer.write(walk([0, 1, 1, 2], [0, 0, 1]).to_stored(action_spec(actions), "walk"))
    writer.close()
    stored = [path.read_bytes() for path in sorted(fifo.glob("*.safetensors"))]
    config.bind({"NoveltyRelabeler.coeff": 0.25, "NoveltyRelabeler.decay": float("inf")})
    dataset = DiskTrajDataset(tmp_path, "b", relabeler=NoveltyRelabeler())
    dataset.configure(DatasetSettings(8))
    loader = SequenceLoader(dataset, 1, workers=0, seed=1)
    (batch,) = loader.batches(1)
    loader.close()
    assert batch.rews[0, :3, 0].tolist() == [0.25, 0, 1.25]
    assert stored == [path.read_bytes() for path in sorted(fifo.glob("*.safetensors"))]
    assert len(stored) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"coeff": -0.1}, "coeff"),
        ({"coeff": float("inf")}, "coeff"),
        ({"decay": -1.0}, "decay"),
        ({"keys": "at"}, "['at']"),
        ({"resolution": 0.0}, "resolution"),
        ({"features": []}, "features"),
        ({"features": [0, -1]}, "features"),
    ],
)
def test_bad_settings_are_refused_by_name(arguments, said):
    with pytest.raises(ValueError, match=naming(said)):
        NoveltyRelabeler(**arguments)


def test_a_missing_observation_is_named():
    with pytest.raises(ValueError, match=naming("'there'", ["at"])):
        NoveltyRelabeler(keys=["there"])(walk([0, 1]))
