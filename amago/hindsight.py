"""Public names of `amago.data`, under the module that scripts import them from."""

from amago.data.relabel import NoOpRelabeler, Relabeler
from amago.data.trajectory import FrozenTraj, StoredTraj, Timestep, Trajectory

__all__ = ["FrozenTraj", "NoOpRelabeler", "Relabeler", "StoredTraj", "Timestep", "Trajectory"]
