"""`RLData`, padding, and datasets, used as code written for the original system uses them."""

import pickle
import random
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import original_files as of
import pytest
import tiny
import torch
from messages import naming
from store_helpers import writer
from torch.utils.data import DataLoader

import amago
from amago.data.trajectory import StoredTraj
from amago.hindsight import Relabeler
from amago.loading import (
    DatasetSettings,
    DiskTrajDataset,
    DoNothingDataset,
    MixtureOfDatasets,
    RLData,
    RLData_pad_collate,
    RLDataset,
    SequenceLoader,
)
from amago.nets.goal_embedders import TokenGoalEmb


def sequence(t, start=0, **more):
    """Rewards and actions that say when they were, as a client makes them: without rl2s."""
    times = torch.arange(start, start + t + 1)[:, None]
    return RLData(
        obs={"observation": times.float().expand(-1, 2).clone()} | more, rews=times[1:].float(), time_idxs=times,
        actions=torch.nn.functional.one_hot(times[1:, 0] % 3, 3).float(), dones=times[1:] == start + t,
    )  # fmt: skip


@pytest.mark.parametrize("padded", ["none", "left", "right", "both"])
def test_random_slices(padded):
    lengths = set()
    for _ in range(200):
        data = sequence(20)
        assert data.random_slice(8, padded_sampling=padded) is data
        n = len(data)
        assert 1 <= n <= 8
        t = data.time_idxs[:, 0]
        assert t.diff().eq(1).all()
        assert data.obs["observation"].shape == (n + 1, 2)
        for column in (data.obs["observation"][:, 0], data.rl2s[:, 0]):
            assert column.tolist() == t.tolist()
        assert data.rews[:, 0].tolist() == t[1:].tolist()
        lengths.add(n)
    assert lengths == {8} if padded == "none" else len(lengths) > 4


def test_slices_follow_torchs_seed():
    def starts():
        torch.manual_seed(3)
        return [int(sequence(50).random_slice(4).time_idxs[0]) for _ in range(10)]

    assert starts() == starts()
    assert len(set(starts())) > 3
    assert len(sequence(5).random_slice(100)) == 5
    with pytest.raises(ValueError, match=naming("padded_sampling", "middle")):
        sequence(5).random_slice(3, "middle")


WORDS = gym.spaces.Dict({"words": gym.spaces.Box(0, 2, (3,), np.int64), "pixels": gym.spaces.Box(0, 255, (2,), np.uint8)})


class Words(RLDataset):
    """Sequences of different lengths over a vocabulary of three words."""

    def sample_random_trajectory(self, rng):
        t = int(rng.integers(1, 5))
        words = torch.from_numpy(rng.integers(0, 3, (t + 1, 3)))
        data = sequence(t)
        data.obs = {"words": words, "pixels": torch.zeros(t + 1, 2, dtype=torch.uint8)}
        return data


@pytest.mark.parametrize("on_disk", [False, True])
def test_padded_integers_stay_in_a_small_vocabulary(tmp_path, on_disk):
    """4 would be looked up beyond the end of a table of three words: an IndexError, and an aborted process on a GPU."""
    dataset = DiskTrajDataset(tmp_path, "d") if on_disk else Words()
    if on_disk:
        with writer(tmp_path / "d" / "buffer", action_space=gym.spaces.Discrete(3), obs_space=WORDS) as w:
            for t in (1, 4, 9):
                w.write(of_words(t))
    dataset.configure(DatasetSettings(4))
    dataset.check_spaces(WORDS, gym.spaces.Discrete(3))
    batch = dataset.sample_batch(np.random.default_rng(0), 8)
    pad = ~batch.mask[..., 0]
    assert pad.any()
    assert (batch.obs["words"][pad] == 2).all()
    assert (batch.obs["pixels"][pad] == 4).all()
    assert TokenGoalEmb(WORDS["words"])(batch.obs["words"]).isfinite().all()
    with pytest.raises(IndexError):
        TokenGoalEmb(WORDS["words"])(torch.full_like(batch.obs["words"], 4))


def of_words(t):
    obs = {"words": np.zeros((t + 1, 3), np.int64), "pixels": np.zeros((t + 1, 2), np.uint8)}
    return StoredTraj(obs, np.zeros((t, 1), np.int64), np.zeros((t, 1), np.float32), np.zeros((t, 1), bool))


class Client(RLDataset):
    """As code for the original writes one: whole trajectories, from a random stream of its own."""

    def __init__(self, dset_name=None):
        super().__init__(dset_name=dset_name)
        self.heard, self.drawn = [], 0

    @property
    def save_new_trajs_to(self):
        return None

    def get_description(self):
        return "made up"

    def sample_random_trajectory(self):
        self.drawn += 1
        return sequence(random.choice([3, 20, 30]))

    def on_end_of_collection(self, experiment):
        self.heard.append(experiment)
        return {"Heard": len(self.heard)}


def like_an_experiment():
    return SimpleNamespace(
        train_batches_per_epoch=5, batch_size=4, accelerator=SimpleNamespace(num_processes=2), max_seq_len=8, padded_sampling="none",
        has_dset_edit_rights=True,
    )  # fmt: skip


def test_so_it_does_from_the_replay_buffer(tmp_path):
    e = tiny.learned(tmp_path, epochs=1)
    assert len(e.dataset) == e.train_batches_per_epoch * e.batch_size
    copied = pickle.loads(pickle.dumps(e.dataset))  # as the workers of other start methods than fork get it
    found = []
    for dataset in (e.dataset, e.dataset, copied):
        torch.manual_seed(0)
        loader = DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=RLData_pad_collate, multiprocessing_context="fork")
        found.append([b.rews for b in loader])
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True))


def test_what_is_drawn_in_training_is_cut_and_said_to_be_unrepeatable(caplog):
    dataset = Client()
    dataset.configure_from_experiment(like_an_experiment())
    assert caplog.text.count("takes no rng") == 1
    loader = SequenceLoader(dataset, 16, workers=2)
    for batch in loader.batches(4):
        assert batch.rews.shape[1] == 8
        assert set(batch.transition_mask.sum((1, 2)).tolist()) <= {3, 8}
    loader.close()


def test_a_client_may_read_the_experiment_itself(tmp_path):
    class Reader(Client):
        def configure_from_experiment(self, experiment):
            super().configure_from_experiment(experiment)
            self.read = experiment.run_name

    reader = Reader()
    mixture = MixtureOfDatasets([reader, DoNothingDataset()], [0.5, 0.5])
    e = tiny.experiment(tmp_path, dataset=mixture)
    e.start()
    assert (reader.read, reader.max_seq_len) == ("run", e.max_seq_len)
    mixture.on_end_of_collection()
    assert reader.heard == [e]


class Named(Client):
    def __init__(self, name, ready=True):
        super().__init__(name)
        self.ready = ready

    @property
    def ready_for_training(self):
        return self.ready


def test_a_mixture_says_what_it_samples():
    parts = [Named("old"), Named("new", ready=False)]
    mixture = MixtureOfDatasets(parts, [0.75, 0.25], smooth_sudden_starts=4, dset_name="both")
    mixture.configure_from_experiment(like_an_experiment())
    assert (mixture.dset_name, mixture.all_datasets, mixture.smooth_sudden_starts) == ("both", parts, 4)
    assert mixture._available_datasets == [(parts[0], 1.0)]
    [old, new] = mixture._dsets_status
    assert (old.dataset, old.final_weight, old.epoch_ready) == (parts[0], 0.75, 0)
    assert (new.dataset, new.final_weight, new.epoch_ready) == (parts[1], 0.25, None)
    parts[1].ready = True
    mixture.update_dset_weights(epoch=3)
    assert mixture._dsets_status[1].epoch_ready == 3
    mixture.update_dset_weights(epoch=7)
    assert dict(zip(["old", "new"], [w for _, w in mixture._available_datasets])) == {"old": 0.75, "new": 0.25}
    metrics = mixture.on_end_of_collection(experiment=None)
    assert metrics["old Heard"] == metrics["new Heard"] == 1
    assert metrics["old Current Sample Weight"] == 0.75
    assert mixture._sampling_metrics == {"old Current Sample Weight": 0.75, "new Current Sample Weight": 0.25}


def test_parts_of_one_name_are_numbered():
    mixture = MixtureOfDatasets([Client(), Client()], [0.5, 0.5])
    mixture.configure(DatasetSettings(4))
    assert set(mixture._sampling_metrics) == {"Client 1 Current Sample Weight", "Client 2 Current Sample Weight"}


def buffer(root, lengths, part="fifo"):
    return [
        of.write(root / "d" / "buffer" / part, of.arrays(of.one_hot(np.arange(t) % 4, 4), seed=i), i, env=part)
        for i, t in enumerate(lengths)
    ]


def configured(cls, root, max_seq_len=100, **options):
    dataset = cls(dset_root=str(root), dset_name="d", **options)
    dataset.configure(DatasetSettings(max_seq_len))
    return dataset


def test_deleted_files_are_counted_and_no_longer_listed(tmp_path):
    e = tiny.learned(tmp_path, save_trajs_as="npz", epochs=2, dataset=DiskTrajDataset(tmp_path, "d", dset_max_size=3))
    dataset = e.dataset
    assert len(dataset.fifo_filenames) == len(dataset.all_filenames) == 3
    deleted = [r["values"]["Trajectory Files Deleted"] for r in tiny.rows(e.run_dir, "buffer")]
    assert sum(deleted) == 5  # of two actors, two episodes each, in two epochs


def test_ready_beyond_the_least_size(tmp_path):
    buffer(tmp_path, [3, 4])
    assert not configured(DiskTrajDataset, tmp_path, dset_min_size=2).ready_for_training
    assert configured(DiskTrajDataset, tmp_path, dset_min_size=1).ready_for_training
    assert configured(DiskTrajDataset, tmp_path).ready_for_training
    with pytest.raises(ValueError, match=naming("dset_min_size", -1)):
        DiskTrajDataset(tmp_path, "d", dset_min_size=-1)
    with pytest.raises(ValueError, match=naming("dset_min_size", "relabeler=")):
        DiskTrajDataset(tmp_path, "d", 10, lambda traj: traj)


def lengths_of(dataset, draws=40):
    return {len(dataset.sample_random_trajectory(np.random.default_rng(i))) for i in range(draws)}


def test_a_subclass_chooses_its_files(tmp_path):
    buffer(tmp_path, [3, 4, 5])
    buffer(tmp_path, [6], "protected")

    class Listed(DiskTrajDataset):
        def _list_abs_path_to_files(self, dir):
            return [path for path in super()._list_abs_path_to_files(dir) if "00000001" not in path]

    class Refreshed(DiskTrajDataset):
        def _refresh_files(self):
            super()._refresh_files()
            self.all_filenames = [path for path in self.all_filenames if path in self.fifo_filenames]

    assert lengths_of(configured(Listed, tmp_path)) == {3, 5, 6}
    dataset = configured(Refreshed, tmp_path)
    assert lengths_of(dataset) == {3, 4, 5}
    assert set(dataset.sample_batch(np.random.default_rng(0), 32).transition_mask.sum((1, 2)).tolist()) == {3, 4, 5}
    buffer(tmp_path, [3, 4, 5, 9])
    dataset.on_end_of_collection()
    assert lengths_of(dataset) == {3, 4, 5, 9}


def test_a_subclass_decides_what_is_deleted(tmp_path):
    class Keeps(DiskTrajDataset):
        def _filter(self):
            self.asked = True

    e = tiny.learned(tmp_path, save_trajs_as="npz", epochs=2, dataset=Keeps(tmp_path, "d", dset_max_size=3))
    assert e.dataset.asked
    assert len(e.dataset.fifo_filenames) == 8


def test_a_subclass_converts_whole_trajectories(tmp_path):
    buffer(tmp_path, [20])

    class Converted(DiskTrajDataset):
        def _traj_to_rl_data(self, traj):
            assert len(traj) == 20
            data = super()._traj_to_rl_data(traj)
            data.rews = data.rews * 0 + 7
            return data

    dataset = configured(Converted, tmp_path, max_seq_len=6)
    assert lengths_of(dataset) == {6}
    assert (dataset.sample_batch(np.random.default_rng(0), 4).rews == 7).all()
    assert len(dataset.sample_random_trajectory()) == 20


@pytest.mark.parametrize("mixed", [False, True])
def test_what_is_read_file_by_file_is_saved_so(tmp_path, mixed):
    class Doubled(Relabeler):
        def relabel(self, traj):
            traj.rews *= 2  # in place
            return traj

    class Drawn(DiskTrajDataset):
        def sample_random_trajectory(self):
            traj = self.relabeler(amago.loading.load_traj_from_disk(random.choice(self.all_filenames)))
            arrays = {k: torch.from_numpy(getattr(traj, k)) for k in ("rl2s", "rews", "dones", "actions", "time_idxs")}
            return RLData(obs={k: torch.from_numpy(v) for k, v in traj.obs.items()}, **arrays)

    drawn = Drawn(dset_root=str(tmp_path), dset_name="d", dset_max_size=50, relabeler=Doubled())
    dataset = MixtureOfDatasets([drawn, DoNothingDataset()], [0.5, 0.5]) if mixed else drawn
    e = tiny.learned(tmp_path, dataset=dataset)
    assert len(drawn.all_filenames) == 4
    assert all(path.endswith(".npz") for path in drawn.all_filenames)
    assert tiny.rows(e.run_dir, "train")
