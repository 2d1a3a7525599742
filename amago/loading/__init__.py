"""From trajectories to training batches."""

from amago.loading.data import Batch, RLData, collate
from amago.loading.dataset import DatasetSettings, DiskTrajDataset, RLDataset
from amago.loading.loader import SequenceLoader

__all__ = ["Batch", "DatasetSettings", "DiskTrajDataset", "RLData", "RLDataset", "SequenceLoader", "collate"]
