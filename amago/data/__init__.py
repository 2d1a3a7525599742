"""Trajectories, training sequences, batches, extra fields, and hindsight relabelling."""
