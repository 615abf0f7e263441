"""The files of each push in a folder: `files/` as they came, and a `recipe` for the weights."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from adapter_store.disk_store.record_files import RecordFiles
from adapter_store.errors import DataLoss
from adapter_store.files.hashing import bulk_hash, file_hash
from adapter_store.files.memory import read_file
from adapter_store.files.seal import seal, unseal
from adapter_store.packed.recipe import recipe_pieces
from adapter_store.peft.folder import WEIGHTS_FILE, PeftAdapter
from adapter_store.pushed import PushedFiles
from adapter_store.ref import Ref

_FILES, _RECIPE, _HASHES = "files", "recipe", "hashes.json"
_OWNER = "+"  # between tenant, name and number of a push; no name has it


class PushFolder:
    """It belongs to one version under one name, and says so: another's is never taken for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def files(self) -> Path:
        return self.folder / _FILES

    def write(self, ref: Ref, adapter: PeftAdapter) -> None:
        """Writes the files of an adapter that was read from `files`. The caller syncs the folder."""
        with (self.folder / _RECIPE).open("wb") as recipe:
            for piece in recipe_pieces(adapter):
                recipe.write(piece)
        (self.files / WEIGHTS_FILE).unlink()
        hashes = {name: file_hash(self.files / name) for name in sorted(os.listdir(self.files))}
        hashes[_RECIPE] = file_hash(self.folder / _RECIPE)
        (self.folder / _HASHES).write_bytes(seal(_key(ref), json.dumps(hashes)))

    def hashes(self, ref: Ref) -> dict[str, str]:
        """The hashes by file. Raises DataLoss, OSError."""
        try:
            found = json.loads(unseal(_key(ref), (self.folder / _HASHES).read_bytes()))
            return {str(name): str(value) for name, value in found.items()}
        except FileNotFoundError as error:
            raise DataLoss(f"the pushed files of {ref} are gone: push the adapter again") from error

    def read(self, ref: Ref) -> PushedFiles:
        """Raises DataLoss, naming what is damaged, and OSError."""
        found = {name: self._read(ref, name, expected) for name, expected in self.hashes(ref).items()}
        recipe = found.pop(_RECIPE)
        return PushedFiles(recipe, found)

    def _read(self, ref: Ref, name: str, expected: str) -> memoryview:
        try:
            content = read_file(self.folder / _RECIPE if name == _RECIPE else self.files / name)
        except FileNotFoundError as error:
            raise DataLoss(f"{name} of {ref} is gone: push the adapter again") from error
        if bulk_hash(content) != expected:
            raise DataLoss(f"{name} of {ref} no longer matches its hash: push the adapter again")
        return content


class PushFolders:
    """All of a store, by whose they are: `<tenant>+<name>+<files>`. Raises OSError."""

    def __init__(self, root: Path, records: RecordFiles) -> None:
        self.root, self._records = root, records

    def of(self, ref: Ref, files: str) -> PushFolder:
        return PushFolder(self.root / _OWNER.join((ref.tenant, ref.name, files)))

    def same(self, pushed: PushFolder, ref: Ref) -> str:
        """Which files the name has of the version in `ref`, when they are those, and whole; else ""."""
        entry = self._records.read(ref.tenant, ref.name).versions.get(ref.digest or "")
        if entry is None or not entry.push.files:
            return ""
        stored = self.of(ref, entry.push.files)
        try:
            stored.read(ref)
            return entry.push.files if stored.hashes(ref) == pushed.hashes(ref) else ""
        except DataLoss:
            return ""

    def of_name(self, ref: Ref) -> Iterator[Path]:
        """All that the name has, named by its record or not."""
        yield from sorted(self.root.glob(_OWNER.join((ref.tenant, ref.name, "*"))))

    def beside(self, files: set[str]) -> Iterator[Path]:
        """All but these."""
        for name in os.listdir(self.root):
            if name.rpartition(_OWNER)[2] not in files:
                yield self.root / name

    def unnamed(self) -> Iterator[str]:
        """Those that no record names, as far as records can be read."""
        for folder in self.root.iterdir():
            if folder.is_dir():
                tenant, name, files = folder.name.split(_OWNER)
                record = self._records.read_if_whole(tenant, name)
                if record is not None and files not in record.push_files():
                    yield folder.name


def _key(ref: Ref) -> str:
    return f"files of {ref.tenant}/{ref.name}@{ref.digest}"
