"""One training run: settings, checks, collecting, updates, evaluation, state, checkpoints, metrics, console, signals."""
