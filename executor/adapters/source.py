"""Where an executor reads adapters: the store of the settings, behind the cache of this machine."""

from pathlib import Path

from adapter_store import CachedStore, NoStore, WeightsSource, open_store
from executor.config import ExecutorConfig
from executor.errors import StartError


def open_source(config: ExecutorConfig) -> WeightsSource:
    """Every rank opens its own. An executor only reads: it makes no store. Raises StartError when there is
    none, AdapterStoreError."""
    try:
        store = open_store(config.store, create=False, allow_volatile=config.allow_volatile)
    except NoStore as error:
        raise StartError(f"--store: {error}") from error
    return CachedStore(store, Path(config.cache_dir), config.cache_bytes) if config.cache_dir else store
