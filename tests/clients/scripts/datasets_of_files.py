"""Datasets that find and draw their files by themselves, beside an offline one, in a mixture whose weights are set from outside (R, M)."""

import os
import random
import sys

import numpy as np
import torch
from small import SIZES, experiment

import amago
from amago.cli_utils import use_config
from amago.loading import DiskTrajDataset, MixtureOfDatasets, NoOpRelabeler, Relabeler, RLData, RLDataset, _DatasetStatus


class Doubled(Relabeler):
    def relabel(self, traj):
        assert isinstance(traj, amago.loading.FrozenTraj)
        traj.rews = traj.rews * 2
        return traj


class LatestFiles(DiskTrajDataset):
    def _refresh_files(self):
        self.fifo_filenames = {os.path.join(self.fifo_path, f) for f in os.listdir(self.fifo_path) if f.endswith(".npz")}
        self.all_filenames = list(self.fifo_filenames | self._list_abs_path_to_files(self.protected_path))

    def sample_random_trajectory(self):
        path = random.choice(self.all_filenames)
        traj = amago.loading.load_traj_from_disk(path)
        if not isinstance(traj, amago.hindsight.FrozenTraj):
            traj = traj.freeze()
        return self._traj_to_rl_data(self.relabeler(traj))

    def _traj_to_rl_data(self, traj):
        return RLData(
            obs={k: torch.from_numpy(v) for k, v in traj.obs.items()}, rl2s=torch.from_numpy(traj.rl2s), rews=torch.from_numpy(traj.rews),
            dones=torch.from_numpy(traj.dones), actions=torch.from_numpy(traj.actions), time_idxs=torch.from_numpy(traj.time_idxs),
        )  # fmt: skip


class Recorded(RLDataset):
    """Recordings without rl2s, and with a time index too few."""

    @property
    def save_new_trajs_to(self):
        return None

    def get_description(self):
        return f"Recorded ({self.dset_name}, {self.items_per_epoch})"

    def on_end_of_collection(self, experiment):
        experiment.accelerator.wait_for_everyone()
        return {"Seen Epoch": experiment.epoch}

    def sample_random_trajectory(self):
        T = 8
        obs = {"digit": torch.randint(0, 3, (T + 1, 1), dtype=torch.int32), "turn": torch.rand(T + 1, 1)}
        actions = torch.nn.functional.one_hot(torch.randint(0, 3, (T,)), 3).float()
        dones = torch.zeros(T, 1, dtype=torch.bool)
        dones[-1] = True
        return RLData(obs=obs, rews=torch.rand(T, 1), dones=dones, actions=actions, time_idxs=torch.arange(T)[:, None])


class Mixed(MixtureOfDatasets):
    def update_dset_weights(self, epoch):
        super().update_dset_weights(epoch)
        self.seen = [(s.dataset.dset_name, s.final_weight, s.epoch_ready) for s in self._dsets_status]


if __name__ == "__main__":
    use_config(SIZES)
    files = LatestFiles(dset_root=sys.argv[1], dset_name="files", dset_max_size=50, dset_min_size=1, relabeler=Doubled())
    assert isinstance(NoOpRelabeler(), Relabeler)
    recorded = Recorded(dset_name="rec")
    mixture = Mixed([recorded, files], [0.5, 0.5], dset_name="all")
    exp = experiment(dataset=mixture, save_trajs_as="npz", epochs=3)
    exp.start()
    assert mixture.configured and mixture.has_edit_rights and mixture.items_per_epoch == 8
    exp.learn()
    assert files.ready_for_training and len(files.all_filenames) == len(files.fifo_filenames) > 1
    mixture._dsets_status = [_DatasetStatus(dataset=recorded, initial_weight=0.0, final_weight=1.0, epoch_ready=0)]
    mixture.update_dset_weights(5)
    assert mixture._available_datasets == [(recorded, 1.0)]
    batch = next(iter(exp.train_dloader))
    assert batch.rl2s.shape[-1] == 4 and np.isfinite(batch.rl2s.cpu().numpy()).all()
    exp.delete_buffer_from_disk()
