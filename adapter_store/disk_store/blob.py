"""One version's content as a folder: immutable, shared by every name that pushed it."""

import json
import os
import shutil
from pathlib import Path

from adapter_store.errors import DataLoss
from adapter_store.files.hashing import file_hash
from adapter_store.files.seal import seal, unseal
from adapter_store.manifest import Manifest
from adapter_store.packed.form import Weights
from adapter_store.packed.packer import Packing
from adapter_store.peft.folder import PeftAdapter

_MANIFEST, _PACKED, _SOURCE, _SOURCE_HASHES = "manifest.json", "packed.safetensors", "source", "source.json"


class Blob:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def source(self) -> Path:
        return self.folder / _SOURCE

    @property
    def packed(self) -> Path:
        return self.folder / _PACKED

    def write(self, adapter: PeftAdapter) -> Manifest:
        """Packs `adapter` beside its source files. The caller syncs the folder."""
        with self.packed.open("wb") as packed:
            manifest = Packing(adapter).write(packed)
        hashes = {file.name: file_hash(file) for file in sorted(self.source.iterdir())}
        self._write_sealed(_SOURCE_HASHES, json.dumps(hashes))
        self._write_sealed(_MANIFEST, manifest.to_json())
        return manifest

    def write_copy(self, weights: Weights) -> None:
        """What a reader needs, without the source files."""
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

    def verify(self, digest: str) -> None:
        """Hashes everything. Raises DataLoss, naming what is damaged."""
        with self.weights() as weights:
            if weights.manifest.digest != digest:
                raise DataLoss(f"the content stored as {digest} is {weights.manifest.digest}")
        for name, expected in self._source_hashes().items():
            try:
                found = file_hash(self.source / name)
            except FileNotFoundError as error:
                raise DataLoss(f"{name} of {digest} is gone: push the adapter again") from error
            if found != expected:
                raise DataLoss(f"{name} of {digest} no longer matches its hash: push the adapter again")

    def export(self, digest: str, target: Path) -> None:
        """Raises DataLoss before anything is written, FileExistsError when `target` is not empty."""
        self.verify(digest)
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise FileExistsError(f"{target} is not empty")
        for name in self._source_hashes():
            shutil.copyfile(self.source / name, target / name)

    def _source_hashes(self) -> dict[str, str]:
        try:
            return {str(name): str(value) for name, value in json.loads(self._sealed(_SOURCE_HASHES)).items()}
        except (ValueError, AttributeError) as error:
            raise DataLoss(f"{_SOURCE_HASHES} in {self.folder.name} is damaged: {error!r}") from error

    def _write_sealed(self, name: str, text: str) -> None:
        (self.folder / name).write_bytes(seal(name, text))

    def _sealed(self, name: str) -> str:
        try:
            return unseal(name, (self.folder / name).read_bytes())
        except FileNotFoundError as error:
            raise DataLoss(f"{name} of stored content {self.folder.name} is gone") from error
