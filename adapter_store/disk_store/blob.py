"""The content of versions as folders: immutable, shared by every name that pushed it."""

import os
import threading
from pathlib import Path

from adapter_store.errors import AdapterNotFound, DataLoss
from adapter_store.files.seal import seal, unseal
from adapter_store.manifest import Manifest
from adapter_store.packed.form import Weights
from adapter_store.packed.packer import Packing
from adapter_store.peft.folder import PeftAdapter

_MANIFEST, _PACKED = "manifest.json", "packed.safetensors"


class Blob:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def packed(self) -> Path:
        return self.folder / _PACKED

    def write(self, adapter: PeftAdapter, digest: str | None = None) -> Manifest:
        """Packs `adapter` into the folder, made here. The caller syncs it."""
        self.folder.mkdir()
        with self.packed.open("wb") as packed:
            manifest = Packing(adapter, digest).write(packed)
        self._write_sealed(_MANIFEST, manifest.to_json())
        return manifest

    def write_copy(self, weights: Weights) -> None:
        with self.packed.open("wb") as packed:
            weights.write_to(packed)
        self._write_sealed(_MANIFEST, weights.manifest.to_json())

    def manifest(self) -> Manifest:
        """Raises DataLoss."""
        return Manifest.from_json(self._sealed(_MANIFEST))

    def weights(self, *, verify: bool = True) -> Weights:
        """Raises DataLoss."""
        return Weights.open(self.packed, self.manifest(), verify=verify)

    def identity(self) -> tuple[int, int, int] | None:
        """Changes when the packed file is replaced or written to; None when there is none."""
        try:
            status = os.stat(self.packed)
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def upload(self) -> str:
        """Another for each push that stored it anew; "" when there is none."""
        try:
            status = os.stat(self.folder)
        except FileNotFoundError:
            return ""
        return f"{status.st_ino}-{status.st_ctime_ns}"

    def verified(self, digest: str, *, known: bool = False) -> Weights:
        """Hashes everything, unless the file is `known`. Raises DataLoss, naming what is damaged."""
        weights = self.weights(verify=not known)
        if weights.manifest.digest != digest:
            raise DataLoss(f"the content stored as {digest} is {weights.manifest.digest}")
        return weights

    def _write_sealed(self, name: str, text: str) -> None:
        (self.folder / name).write_bytes(seal(name, text))

    def _sealed(self, name: str) -> str:
        try:
            return unseal(name, (self.folder / name).read_bytes())
        except FileNotFoundError as error:
            raise DataLoss(f"{name} of stored content {self.folder.name} is gone") from error


class Blobs:
    """All of a store or a cache, by digest. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._verified: dict[str, tuple[int, int, int]] = {}  # digest -> identity of the file that was hashed
        self._mutex = threading.Lock()  # guards it

    def of(self, digest: str) -> Blob:
        return Blob(self.root / digest.removeprefix("sha256:"))

    def stored(self, digest: str) -> Blob:
        """Raises AdapterNotFound when there is none, OSError when the whole store is away."""
        blob = self.of(digest)
        if not blob.folder.exists():
            self.root.stat()
            raise AdapterNotFound(f"adapter version {digest} was not found")
        return blob

    def open(self, digest: str) -> Weights:
        """Hashed once, for as long as the file is the same. Raises AdapterNotFound, DataLoss."""
        blob = self.stored(digest)
        identity = blob.identity()
        with self._mutex:
            known = identity is not None and self._verified.get(digest) == identity
        weights = blob.verified(digest, known=known)
        if identity is not None:
            with self._mutex:
                self._verified[digest] = identity
        return weights

    def is_healthy(self, digest: str) -> bool:
        """Hashes all of it, whatever was found before: a push is how damage is repaired."""
        blob = self.of(digest)
        if not blob.folder.exists():
            return False
        try:
            blob.verified(digest).close()
        except DataLoss:
            return False
        return True

    def forget(self, digest: str) -> None:
        """It goes."""
        with self._mutex:
            self._verified.pop(digest, None)
