"""Benchmark of streaming many answers: `python -m scheduler.bench.streaming --json FILE`."""
