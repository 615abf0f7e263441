"""Benchmarks of the kernels on a GPU: `python -m kernels.bench OP --json FILE`."""
