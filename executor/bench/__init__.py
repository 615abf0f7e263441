"""Benchmarks of the engine's parts, and engines to run under load: `python -m executor.bench`."""
