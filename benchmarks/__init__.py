"""Speed of each part of the library relative to a lower bound on its work: ``python -m benchmarks NAME``; see
docs/performance.md."""
