"""Environments and wrappers of the examples beside this folder: import them as `support.NAME` from a script in `examples/`."""
