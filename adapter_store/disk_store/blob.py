"""One version's content as a folder: immutable, shared by every name that pushed it."""

import os
from pathlib import Path

from adapter_store.errors import DataLoss
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

    def verified(self, digest: str) -> Weights:
        """Hashes everything. Raises DataLoss, naming what is damaged."""
        weights = self.weights()
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
