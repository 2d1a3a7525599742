"""From trajectories to training batches."""

from amago.loading.arrays import ArrayDataset
from amago.loading.d4rl import D4RLDataset
from amago.loading.data import Batch, RLData, collate
from amago.loading.dataset import DatasetSettings, DiskTrajDataset, DoNothingDataset, RLDataset
from amago.loading.loader import SequenceLoader
from amago.loading.minari import MinariDataset
from amago.loading.mixture import MixtureOfDatasets
from amago.loading.offline import OfflineDataset
from amago.relabeling import GoalSequenceRelabeler

__all__ = [
    "ArrayDataset",
    "Batch",
    "D4RLDataset",
    "DatasetSettings",
    "DiskTrajDataset",
    "DoNothingDataset",
    "GoalSequenceRelabeler",
    "MinariDataset",
    "MixtureOfDatasets",
    "OfflineDataset",
    "RLData",
    "RLDataset",
    "SequenceLoader",
    "collate",
]
