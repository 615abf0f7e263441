"""A disk cache between a store and its reader: the weights used last, in a folder of this machine.

    entries/<hex>/   packed.safetensors and manifest.json, as in a store; its time is that of its last use
    locks/<xx>       held while a digest that begins so is looked for or fetched: one fetch for all who wait
    lock             held while entries come and go
    tmp/             work in progress, and what crashes left

Any number of processes may share it. Nothing is synced: every entry is checked against its digest when a
process first opens it, and one that is damaged, half-written or removed under way is fetched again.

Entries are packed files, not slot images: executors of every layout, rank and data type share one copy, its
own digest proves it, and laying it out is done in the copy to host memory that an image needs, too ("warm
disk" in adapter_store/bench).
"""

import contextlib
import logging
import os
import shutil
import time
import uuid
from pathlib import Path

from adapter_store.disk_store.blob import Blob, Blobs
from adapter_store.errors import AdapterNotFound, DataLoss
from adapter_store.files.durable import claimed, exclusive, medium_errors, remove_unclaimed
from adapter_store.packed.form import Weights
from adapter_store.ref import check_digest
from adapter_store.store import WeightsSource

_log = logging.getLogger(__name__)


class CachedStore:
    """A WeightsSource, thread-safe. At most `max_bytes` stay, those used last; what is larger passes."""

    def __init__(self, store: WeightsSource, folder: Path, max_bytes: int) -> None:
        """Raises StoreUnavailable when the folder cannot be used."""
        self._store, self._folder, self._max_bytes = store, folder, max_bytes
        self._entries, self._locks, self._tmp = folder / "entries", folder / "locks", folder / "tmp"
        self._blobs = Blobs(self._entries)
        with medium_errors():
            for each in (self._entries, self._locks, self._tmp):
                each.mkdir(parents=True, exist_ok=True)
            with exclusive(folder / "lock"):
                remove_unclaimed(self._tmp)
                self._evict()

    def open(self, digest: str) -> Weights:
        """Opens as the store behind it, whose state matters only for what is not here."""
        check_digest(digest)
        with medium_errors(), exclusive(self._locks / digest.removeprefix("sha256:")[:2]):
            weights = self._find(digest)
            if weights is None:
                weights = self._store.open(digest)
                self._keep(weights)
            return weights

    def discard(self, digest: str) -> None:
        """Frees the copy, if there is one. Weights that are open stay readable."""
        check_digest(digest)
        turn, lock = self._locks / digest.removeprefix("sha256:")[:2], self._folder / "lock"
        with medium_errors(), exclusive(turn), exclusive(lock):
            self._discard(self._blobs.of(digest).folder)

    def held(self) -> dict[str, int]:
        """Bytes of the packed files that are here, by digest. Others who share the folder change it, too."""
        with medium_errors():
            names = os.listdir(self._entries)
        found = {name: _packed_size(self._entries / name) for name in names}
        return {f"sha256:{name}": size for name, size in found.items() if size is not None}

    def _find(self, digest: str) -> Weights | None:
        blob = self._blobs.of(digest)
        if not blob.folder.exists():
            return None
        try:
            weights = self._blobs.open(digest)
            _mark_used(blob.folder)
            return weights
        except (AdapterNotFound, DataLoss, OSError) as error:
            _log.warning("adapter cache: %s is fetched again: %s", digest, error)
            with exclusive(self._folder / "lock"):
                self._discard(blob.folder)
            return None

    def _keep(self, weights: Weights) -> None:
        """A disk that fails or is full costs the copy, not the load."""
        manifest = weights.manifest
        if manifest.num_bytes > self._max_bytes:
            return
        folder = self._tmp / uuid.uuid4().hex
        try:
            with contextlib.ExitStack() as stack:
                with exclusive(self._folder / "lock"):  # or a start could take the new folder for a crash's
                    folder.mkdir()
                    stack.enter_context(claimed(folder))
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                Blob(folder).write_copy(weights)
                _mark_used(folder)
                with exclusive(self._folder / "lock"):
                    target = self._blobs.of(manifest.digest).folder
                    self._discard(target)
                    folder.rename(target)
                    self._evict()
        except OSError as error:
            _log.warning("adapter cache: %s is not kept: %s", manifest.digest, error)

    def _evict(self) -> None:
        """Under the lock."""
        entries = sorted((path.stat().st_mtime_ns, _size(path), path) for path in self._entries.iterdir())
        excess = sum(size for _, size, _ in entries) - self._max_bytes
        for _, size, path in entries:
            if excess <= 0:
                return
            self._discard(path)
            excess -= size

    def _discard(self, folder: Path) -> None:
        """Out of sight in one rename. Mappings of its file stay valid."""
        doomed = self._tmp / uuid.uuid4().hex
        try:
            folder.rename(doomed)
        except FileNotFoundError:
            return
        self._blobs.forget(f"sha256:{folder.name}")
        shutil.rmtree(doomed, ignore_errors=True)


def _mark_used(folder: Path) -> None:
    now = time.time_ns()  # finer than what the file system would take
    os.utime(folder, ns=(now, now))


def _packed_size(entry: Path) -> int | None:
    identity = Blob(entry).identity()
    return None if identity is None else identity[2]


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
