"""A page about training runs, made from their files on disk: no agent is loaded."""
