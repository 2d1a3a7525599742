"""Whether the parts of an agent keep the contracts of their base classes.

Shapes: B sequences or actors, L timesteps, D numbers of a timestep's input, E of its output.
"""

from amago.agent.checking.sequences import check_traj_encoder
from amago.agent.checking.timesteps import check_tstep_encoder

__all__ = ["check_traj_encoder", "check_tstep_encoder"]
