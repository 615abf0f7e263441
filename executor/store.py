"""Where an executor reads adapters: the store of the settings, behind the cache of this machine."""

from pathlib import Path

from adapter_store import CachedStore, WeightsSource, open_store
from executor.config import ExecutorConfig


def open_source(config: ExecutorConfig) -> WeightsSource:
    """Every rank opens its own. Raises AdapterStoreError."""
    store = open_store(config.store, allow_volatile=config.allow_volatile)
    return CachedStore(store, Path(config.cache_dir), config.cache_bytes) if config.cache_dir else store
