"""Benchmarks of the kernels: `python -m kernels.bench OP --json FILE` on a machine with a GPU."""
