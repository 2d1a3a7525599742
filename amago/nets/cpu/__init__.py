"""Fast paths for CPUs; each has a plain reference beside it, and the tests compare the two."""
