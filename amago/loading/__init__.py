"""From trajectories to training batches."""

from torch.utils.data import Dataset as Dataset

from amago.compat.names import attributes
from amago.data.batch import Batch, RLData, collate
from amago.data.batch import collate as RLData_pad_collate
from amago.data.trajectory import MAGIC_PAD_VAL
from amago.loading.checking import check_dataset
from amago.loading.dataset import DatasetSettings, DoNothingDataset, RLDataset
from amago.loading.disk import DiskTrajDataset, HistoryDataset, get_path_to_trajs, load_traj_from_disk
from amago.loading.loader import SequenceLoader
from amago.loading.mixture import MixtureOfDatasets
from amago.loading.offline import OfflineDataset
from amago.loading.offline.arrays import ArrayDataset, D4RLDataset
from amago.loading.offline.minari import MinariDataset
from amago.loading.offline.original import OriginalDataset
from amago.loading.offline.parquet import ParquetDataset
from amago.relabeling import GoalSequenceRelabeler, LastRewardShaping, NoveltyRelabeler

__all__ = [
    "MAGIC_PAD_VAL", "ArrayDataset", "Batch", "D4RLDataset", "DatasetSettings", "DiskTrajDataset", "DoNothingDataset",
    "GoalSequenceRelabeler", "HistoryDataset", "LastRewardShaping", "MinariDataset", "MixtureOfDatasets",
    "NoveltyRelabeler", "OfflineDataset", "OriginalDataset", "ParquetDataset", "RLData", "RLData_pad_collate",
    "RLDataset", "SequenceLoader", "check_dataset", "collate", "get_path_to_trajs", "load_traj_from_disk",
]  # fmt: skip

__getattr__ = attributes(__name__)
