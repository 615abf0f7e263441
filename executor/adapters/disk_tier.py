"""Tells what the disk cache of this machine holds as it changes, from a thread: looking is slow."""

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from adapter_store import AdapterStoreError, CachedStore
from executor.adapters.residency import Copy, Tier

_LOOK_INTERVAL_S = 1.0  # other executors that share the folder change it, too

logger = logging.getLogger(__name__)


class DiskTier:
    """`tell` gets all copies, on the tier's thread, whenever they are others than before; `discarded` the
    digest of each `discard`, once what it left has been told."""

    def __init__(
        self,
        cache: CachedStore,
        tell: Callable[[tuple[Copy, ...]], None],
        discarded: Callable[[str], None] = lambda digest: None,
    ) -> None:
        self._cache = cache
        self._tell, self._discarded = tell, discarded
        self._todo: SimpleQueue[str | None] = SimpleQueue()  # digests to discard; None: the end
        self._told: tuple[Copy, ...] = ()
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="disk-tier", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def discard(self, digest: str) -> None:
        """Soon. Weights that are open stay readable."""
        self._todo.put(digest)

    def close(self) -> None:
        self._todo.put(None)

    def _run(self) -> None:
        self._look()
        while True:
            try:
                digest = self._todo.get(timeout=_LOOK_INTERVAL_S)
            except Empty:
                self._look()
                continue
            if digest is None:
                return
            try:
                self._cache.discard(digest)
            except AdapterStoreError as error:
                logger.warning("a copy on disk stays: %s", error, extra={"digest": digest})
            self._look()
            self._discarded(digest)

    def _look(self) -> None:
        try:
            held = self._cache.held()
        except AdapterStoreError as error:
            logger.warning("the cache on disk cannot be looked at: %s", error)
            return
        copies = tuple(Copy(digest, Tier.DISK, held[digest]) for digest in sorted(held))
        if copies != self._told:
            self._told = copies
            self._tell(copies)
