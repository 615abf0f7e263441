"""A folder of format 2 or 3: records as today's, and the files of the first push beside each content."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from adapter_store.errors import AdapterNotFound, DataLoss
from adapter_store.files.durable import medium_errors
from adapter_store.files.memory import read_file
from adapter_store.files.seal import unseal
from adapter_store.old_stores.old_store import HASHES, OldStore
from adapter_store.ref import Ref

_SOURCE, _HASHES, _MANIFEST = "source", "source.json", "manifest.json"


class OldDiskStore(OldStore):
    def __init__(self, root: Path, number: int) -> None:
        self._root = root
        with medium_errors():
            super().__init__(number)

    def export(self, ref: Ref, target: Path) -> None:
        with medium_errors():
            super().export(ref, target)

    def _names(self) -> Iterator[tuple[str, str]]:
        for tenant in sorted(os.listdir(self._root / "names")):
            for file in sorted(os.listdir(self._root / "names" / tenant)):
                yield tenant, file.removesuffix(".json")

    def _record_text(self, tenant: str, name: str) -> str:
        return unseal(f"{tenant}/{name}", (self._root / "names" / tenant / f"{name}.json").read_bytes())

    def _manifest_text(self, digest: str) -> str:
        return self._sealed(digest, _MANIFEST)

    def _write_files(self, digest: str, target: Path) -> None:
        for name, expected in json.loads(self._sealed(digest, _HASHES)).items():
            file = self._blob(digest) / _SOURCE / name
            if not file.exists() or HASHES[self.number](read_file(file)) != expected:
                raise DataLoss(f"{name} of {digest} is damaged")
            shutil.copyfile(file, target / name)

    def _sealed(self, digest: str, name: str) -> str:
        try:
            return unseal(name, (self._blob(digest) / name).read_bytes())
        except FileNotFoundError as error:
            raise AdapterNotFound(f"{name} of {digest} was not found") from error

    def _blob(self, digest: str) -> Path:
        return self._root / "blobs" / digest.removeprefix("sha256:")
