"""Public names of `amago.data`, under the module that scripts import them from."""

from amago.data.relabel import NoOpRelabeler, Relabeler
from amago.data.timesteps import Timestep, Trajectory, TrajectoryBuilder, split_batched_timestep
from amago.data.trajectory import FrozenTraj, StoredTraj

__all__ = [
    "FrozenTraj", "NoOpRelabeler", "Relabeler", "StoredTraj", "Timestep", "Trajectory", "TrajectoryBuilder",
    "split_batched_timestep",
]  # fmt: skip
