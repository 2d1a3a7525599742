"""Learning histories: trajectories joined in order, and labels in place of actions."""

import gymnasium as gym
import numpy as np
import pytest

from amago import ExtraField
from amago.data.trajectory import StoredTraj
from amago.loading import DatasetSettings, HistoryDataset
from amago.store import TrajectoryWriter

LABEL = ExtraField("best", rows="T", dtype="int64")


@pytest.fixture
def run(tmp_path):
    """Two learners, whose five episodes of three steps alternate; observations count the steps of each learner."""
    spaces = {"action_space": gym.spaces.Discrete(4), "obs_space": gym.spaces.Dict(count=gym.spaces.Box(-np.inf, np.inf, (1,)))}
    out = TrajectoryWriter(tmp_path / "run" / "buffer" / "fifo", writer="w", extra_fields=[LABEL], **spaces)
    for episode in range(5):
        for task in range(2):
            count = 100 * task + 3 * episode + np.arange(4, dtype=np.float32)[:, None]
            count[-1] = -1  # an episode's last observation is replaced by the first of the next
            actions, ends = (count[:3].astype(np.int64) % 4), np.array([[False], [False], [True]])
            extras = {"best": 3 - actions[:, 0]}
            out.write(StoredTraj({"count": count}, actions, count[:3], ends, env_name=f"task {task}", extras=extras))
    out.close()
    return tmp_path / "run"


def sequences(dataset, length):
    dataset.configure(DatasetSettings(length, extra_fields=(LABEL,)))
    rng = np.random.default_rng(0)
    return [dataset.sample_random_trajectory(rng) for _ in range(100)]


def test_a_sequence_goes_on_over_episodes(run):
    found = sequences(HistoryDataset(run), 7)
    assert {int(data.obs["count"][0, 0]) for data in found} == {*range(9), *range(100, 109)}, "from any step"
    for data in found:
        first = float(data.obs["count"][0, 0])
        assert data.obs["count"][:7, 0].tolist() == [first + i for i in range(7)], "steps of one learner, in order"
        assert data.rews[:, 0].tolist() == data.obs["count"][:7, 0].tolist()
        assert data.time_idxs[:, 0].tolist() == list(range(8)), "as a rollout that begins"
        assert not data.rl2s[0].any()
        assert data.rl2s[1:, 0].tolist() == data.rews[:, 0].tolist()
        assert not data.dones.any()
        assert data.actions.argmax(-1).tolist() == [int(first + i) % 4 for i in range(7)]


def test_labels_are_cloned_and_actions_remain_inputs(run):
    for data in sequences(HistoryDataset(run, label="best"), 5):
        taken = data.rl2s[1:, 1:].argmax(-1)
        assert taken.tolist() == [int(x) % 4 for x in data.obs["count"][:5, 0]]
        assert data.actions.argmax(-1).tolist() == (3 - taken).tolist()


def test_every_other_episode(run):
    (a, b) = HistoryDataset(run, every=2).source
    assert a.obs["count"][:, 0].tolist() == [0, 1, 2, 6, 7, 8, 12, 13, 14, -1]
    assert (a.env_name, b.env_name) == ("task 0", "task 1")


def test_what_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match="every must be a whole number of at least 1, got 0"):
        HistoryDataset(run, every=0)
    with pytest.raises(ValueError, match="no extra field 'worst'"):
        len(HistoryDataset(run, label="worst"))
    with pytest.raises(ValueError, match="has no trajectories"):
        len(HistoryDataset(tmp_path / "none"))
