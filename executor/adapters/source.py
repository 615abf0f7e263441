"""Where an executor reads adapters: the store of the settings, behind the cache of this machine."""

from pathlib import Path

from adapter_store import AdapterStore, CachedStore, NoStore, WeightsSource, open_store
from executor.config import ExecutorConfig
from executor.errors import StartError


def open_source(config: ExecutorConfig) -> WeightsSource:
    """Every rank opens its own. An executor only reads: it makes no store. Raises StartError when there is
    none, AdapterStoreError."""
    store = _open(config)
    return CachedStore(store, Path(config.cache_dir), config.cache_bytes) if config.cache_dir else store


def count_versions(config: ExecutorConfig) -> int:
    """Versions of all tenants in the store: at least as many as there are adapters. Raises as
    `open_source`."""
    store = _open(config)
    return sum(store.count(tenant) for tenant in store.tenants())


def _open(config: ExecutorConfig) -> AdapterStore:
    try:
        return open_store(config.store, create=False, allow_volatile=config.allow_volatile)
    except NoStore as error:
        raise StartError(f"--store: {error}") from error
