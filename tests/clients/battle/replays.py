"""Duels that were recorded elsewhere, as files of numpy arrays."""

import os
import random

import numpy as np
import torch

from amago.loading import RLData, RLDataset


class ParsedReplays(RLDataset):
    """Draws a file, then gives all of it. Actions that were not seen are rows of zeros."""

    def __init__(self, root, formats, missing_rate=0.0, dset_name=None):
        super().__init__(dset_name=dset_name)
        self.root, self.formats, self.missing_rate = root, formats, missing_rate
        self.filenames = []
        self.refresh_files()

    def refresh_files(self):
        found = sorted(f for f in os.listdir(self.root) if f.endswith(".npz"))
        self.filenames = [os.path.join(self.root, f) for f in found if f.split("_")[0] in self.formats]

    @property
    def save_new_trajs_to(self):
        return None

    @property
    def ready_for_training(self):
        return super().ready_for_training and len(self.filenames) > 0

    def get_description(self):
        return f"Parsed Replays of {', '.join(self.formats)} ({len(self.filenames)} files)"

    def on_end_of_collection(self, experiment):
        if experiment.accelerator.is_main_process:
            self.refresh_files()
        experiment.accelerator.wait_for_everyone()
        return {"Num Replays": len(self.filenames), "Epoch Seen": experiment.epoch}

    def sample_random_trajectory(self):
        with np.load(random.choice(self.filenames)) as data:
            arrays = {k: torch.from_numpy(data[k]) for k in data.files}
        missing = torch.rand(len(arrays["actions"]), 1) < self.missing_rate
        return RLData(
            obs={k.removeprefix("_OBS_KEY_"): v for k, v in arrays.items() if k.startswith("_OBS_KEY_")},
            actions=torch.where(missing, 0.0, arrays["actions"]),
            rews=arrays["rews"],
            dones=arrays["dones"],
            time_idxs=arrays["time_idxs"],
        )
