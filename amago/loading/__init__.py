"""From trajectories to training batches."""

from amago.data.batch import Batch, RLData, collate
from amago.data.relabel import GoalSequenceRelabeler
from amago.loading.checking import check_dataset
from amago.loading.dataset import DatasetSettings, DoNothingDataset, RLDataset
from amago.loading.disk import DiskTrajDataset
from amago.loading.loader import SequenceLoader
from amago.loading.mixture import MixtureOfDatasets
from amago.loading.offline import OfflineDataset
from amago.loading.offline.arrays import ArrayDataset
from amago.loading.offline.d4rl import D4RLDataset
from amago.loading.offline.minari import MinariDataset

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
    "check_dataset",
    "collate",
]
