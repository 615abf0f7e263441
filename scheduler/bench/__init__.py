"""Benchmarks of listing and resolving many adapters: `python -m scheduler.bench --json FILE`."""
