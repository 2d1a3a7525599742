"""Ten learning tasks for comparing settings and methods: ``python -m benchmarks.suite --help``."""
