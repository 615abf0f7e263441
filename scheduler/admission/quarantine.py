"""Versions whose stored bytes fail their digest: refused by name until their content is pushed again."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor

from adapter_store import AdapterNotFound, AdapterStoreError, Curator, DataLoss, Ref
from scheduler.admission.versions import Versions

LOOKS = 5

logger = logging.getLogger(__name__)


class Quarantine:
    """`data_loss` is told of every version that is found damaged: it is what alarms watch."""

    def __init__(
        self, store: Curator, versions: Versions, pool: Executor, data_loss: Callable[[], None]
    ) -> None:
        self._store, self._versions, self._pool = store, versions, pool
        self._data_loss = data_loss
        self._suspected: set[Ref] = set()

    def check(self, ref: Ref) -> str:
        """Hashes all bytes of the version that a digest ref names: into quarantine when they are damaged, out
        of it when they are whole. What is wrong, "" for nothing. Blocking. Raises StoreUnavailable."""
        problem = ""
        for _ in range(LOOKS):
            upload, was_damaged = self._store.upload(ref), self._is_quarantined(ref)
            problem = self._problem(ref)
            if not (problem or was_damaged) or self._told(ref, bool(problem), upload):
                break  # Else a push has repaired it meanwhile.
        if problem:
            self.found_damage()
            logger.error("%s is damaged: %s", ref, problem)
        return problem

    def found_damage(self) -> None:
        self._data_loss()

    def _is_quarantined(self, ref: Ref) -> bool:
        try:
            entry = self._store.record(ref.tenant, ref.name).versions.get(str(ref.digest))
        except DataLoss:
            return False  # Nor can it be put there: what names it is damaged.
        return entry is not None and entry.quarantined

    def _problem(self, ref: Ref) -> str:
        try:
            self._store.verify(ref)
        except AdapterNotFound:
            return ""
        except DataLoss as error:
            return str(error)
        return ""

    def _told(self, ref: Ref, damaged: bool, upload: str) -> bool:
        """Whether the store knows. False: what was looked at is not what is stored now."""
        tenant, name, digest = ref.tenant, ref.name, str(ref.digest)
        try:
            done = self._store.set_quarantined(tenant, name, digest, damaged, upload=upload)
        except (AdapterNotFound, DataLoss):
            return True  # What names it is damaged, too, or it went meanwhile.
        self._versions.forget(tenant, name)
        return done

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
