"""Benchmarks of pushes and loads beside the medium's own speed: `python -m adapter_store.bench`."""
