"""What happened: one step, one trajectory, one batch of sequences, and relabelling in hindsight."""
