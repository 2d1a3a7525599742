"""Datasets of transitions recorded by other programs: Minari, D4RL, arrays."""

from amago.loading.offline.arrays import ArrayDataset, D4RLDataset
from amago.loading.offline.base import OfflineDataset
from amago.loading.offline.minari import MinariDataset

__all__ = ["ArrayDataset", "D4RLDataset", "MinariDataset", "OfflineDataset"]
