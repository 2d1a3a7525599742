"""A page about training runs, made from what they have written to disk: no agent is loaded."""
