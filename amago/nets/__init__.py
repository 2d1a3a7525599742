"""Networks: timestep encoders, sequence models, actors and critics. Import the submodule that you need."""

from amago.compat.names import attributes

__getattr__ = attributes(__name__)
