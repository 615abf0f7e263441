"""Versions whose stored bytes fail their digest: refused by name until their content is pushed again."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor

from adapter_store import AdapterNotFound, AdapterStore, AdapterStoreError, DataLoss, Ref
from scheduler.versions import Versions

logger = logging.getLogger(__name__)


class Quarantine:
    """`data_loss` is told of every version that is found damaged: it is what alarms watch."""

    def __init__(
        self, store: AdapterStore, versions: Versions, pool: Executor, data_loss: Callable[[], None]
    ) -> None:
        self._store, self._versions, self._pool = store, versions, pool
        self._data_loss = data_loss
        self._suspected: set[Ref] = set()

    def check(self, ref: Ref) -> str:
        """Hashes all bytes of the version that a digest ref names: into quarantine when they are damaged, out
        of it when they are whole. What is wrong, "" for nothing. Blocking. Raises StoreUnavailable."""
        try:
            self._store.verify(ref)
            problem = ""
        except AdapterNotFound:
            return ""
        except DataLoss as error:
            problem = str(error)
            self._data_loss()
            logger.error("%s is damaged: %s", ref, problem)
        try:
            self._store.set_quarantined(ref.tenant, ref.name, str(ref.digest), bool(problem))
        except (AdapterNotFound, DataLoss):
            return problem  # What names it is damaged, too, or it went meanwhile.
        self._versions.forget(ref.tenant, ref.name)
        return problem

    def suspect(self, adapter: str, digest: str) -> None:
        """An executor could not use it: its own copy may be damaged, or what is stored. On the event loop."""
        tenant, _, name = adapter.partition("/")
        ref = Ref(tenant, name, digest=digest)
        if ref not in self._suspected:
            self._suspected.add(ref)
            asyncio.get_running_loop().run_in_executor(self._pool, self._look, ref)

    def _look(self, ref: Ref) -> None:
        try:
            self.check(ref)
        except AdapterStoreError as error:
            logger.warning("%s: whether it is damaged is not known: %s", ref, error)
        finally:
            self._suspected.discard(ref)
