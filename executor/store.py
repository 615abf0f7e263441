"""Where an executor reads adapters: the store of the settings, behind the cache of this machine."""

import logging
import threading
from pathlib import Path

from adapter_store import AdapterStoreError, CachedStore, NoStore, WeightsSource, open_store
from executor.config import ExecutorConfig
from executor.errors import StartError

logger = logging.getLogger(__name__)


def open_source(config: ExecutorConfig) -> WeightsSource:
    """Every rank opens its own. An executor only reads: it makes no store. Raises StartError when there is
    none, AdapterStoreError."""
    try:
        store = open_store(config.store, create=False, allow_volatile=config.allow_volatile)
    except NoStore as error:
        raise StartError(f"--store: {error}") from error
    return CachedStore(store, Path(config.cache_dir), config.cache_bytes) if config.cache_dir else store


def discard_copy(source: WeightsSource, digest: str) -> None:
    """From the cache of this machine, on a thread of its own: a file of gigabytes takes a while to go."""
    if isinstance(source, CachedStore):
        threading.Thread(target=_discard, args=(source, digest), name="discard-copy", daemon=True).start()


def _discard(cache: CachedStore, digest: str) -> None:
    try:
        cache.discard(digest)
    except AdapterStoreError as error:
        logger.warning("a copy on disk stays: %s", error, extra={"digest": digest})
