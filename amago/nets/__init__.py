"""Networks: timestep encoders, sequence models, actors and critics. Import the submodule that you need."""
