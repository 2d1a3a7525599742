"""How fast each part is, as a share of what the machine could do: ``python -m benchmarks NAME``; see docs/performance.md."""
