"""Times of the engine's parts on a GPU: `python -m executor.bench --json FILE`."""
