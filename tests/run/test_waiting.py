"""A process that only learns waits for those that collect, but not beside files that it cannot read."""

import numpy as np
import pytest
import safetensors.numpy
import tiny
from store_helpers import put

from amago.loading import DatasetSettings, DiskTrajDataset, DoNothingDataset, MixtureOfDatasets
from amago.run.data import NothingTrainedError, wait_for_data


def of_the_original(part):
    """An archive as the original system writes it, but for its times."""
    t = np.arange(5)
    arrays = {
        "rl2s": np.zeros((5, 3), np.float32), "time_idxs": 2 * t[:, None], "rews": np.zeros((4, 1), np.float32),
        "dones": t[1:, None] == 4, "actions": np.eye(2, dtype=np.float32)[t[1:] % 2], "_OBS_KEY_observation": np.zeros((5, 2)),
    }  # fmt: skip
    np.savez(part / "CartPole_0a1b2c3d_1700000000.25.npz", **arrays)


def of_other_tensors(part):
    """A safetensors file that is no segment, beside the name of one with a million trajectories."""
    n = 1_100_000
    safetensors.numpy.save_file({"ep_offsets": np.arange(n + 1)}, part / f"w-000000000000-n{n}.safetensors")


def of_text(part):
    (part / "README.md").write_text("put demonstrations here")


REFUSED = {
    of_the_original: "time_idxs do not count steps",
    of_other_tensors: "n1100000.safetensors: ",
    of_text: "neither .safetensors nor .npz: not a trajectory file",
}


def buffer(root, part="protected"):
    directory = root / "run" / "buffer" / part
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def opened(root):
    dataset = DiskTrajDataset(root, "run")
    dataset.configure(DatasetSettings(4))
    return dataset


def times(n, then=lambda: None):
    """A pause that calls ``then`` the n-th time, and gives up after ten."""
    calls = []

    def pause():
        calls.append(None)
        if len(calls) == n:
            then()
        assert len(calls) < 10

    pause.calls = calls
    return pause


def test_an_empty_buffer_is_waited_for(tmp_path):
    dataset = opened(tmp_path)
    pause = times(3, lambda: put(buffer(tmp_path).parent, [1]))
    wait_for_data(dataset, 0.0, pause)
    assert dataset.ready_for_training
    assert len(pause.calls) == 3


@pytest.mark.parametrize("part", ["fifo", "protected"])
@pytest.mark.parametrize("refused", REFUSED)
def test_with_refused_files_alone_the_wait_ends_with_the_reasons(tmp_path, refused, part):
    refused(buffer(tmp_path, part))
    for reason in (REFUSED[refused], "an earlier process"):  # the second process finds the file in quarantine, or where it was
        with pytest.raises(NothingTrainedError, match="all 1 files that were found were refused") as error:
            wait_for_data(opened(tmp_path), 0.0, times(1))
        assert (REFUSED[refused] if refused is of_the_original else reason) in str(error.value)
        where = f"{part}/CartPole" if refused is of_the_original else f"quarantine/{part}-"  # others' files stay
        assert where in str(error.value)


def test_files_that_come_in_time_end_the_wait(tmp_path):
    of_text(buffer(tmp_path))
    dataset = opened(tmp_path)
    wait_for_data(dataset, 60.0, times(2, lambda: put(buffer(tmp_path).parent, [1])))
    assert dataset.ready_for_training


def test_many_files_are_counted_but_not_all_listed(tmp_path):
    for i in range(1234):
        (buffer(tmp_path) / f"{i:04d}.txt").touch()
    with pytest.raises(NothingTrainedError, match="all 1,234 files") as error:
        wait_for_data(opened(tmp_path), 0.0, times(1))
    assert str(error.value).count(".txt") == 10
    assert str(error.value).endswith("and 1,224 more")


def test_a_mixture_knows_the_refused_files_of_its_parts(tmp_path):
    of_text(buffer(tmp_path))
    mixture = MixtureOfDatasets([DoNothingDataset(), DiskTrajDataset(tmp_path, "run")], [1, 1])
    mixture.configure(DatasetSettings(4))
    with pytest.raises(NothingTrainedError, match=r"README\.md"):
        wait_for_data(mixture, 0.0, times(1))


def test_a_learner_stops_instead_of_waiting_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("amago.run.building.REFUSED_SECONDS", 0.1)
    of_the_original(buffer(tmp_path))
    for _ in range(2):
        with pytest.raises(NothingTrainedError, match=r"within 0\.1 seconds(.|\n)*CartPole_0a1b2c3d"):
            tiny.learned(tmp_path, train_timesteps_per_epoch=0, resume="auto")
        tiny.close_all()
