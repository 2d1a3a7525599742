"""One training run: settings, checks, actors, updates, evaluation, training states, checkpoints, metrics, console, signals."""
