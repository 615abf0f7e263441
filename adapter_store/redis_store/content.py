"""What is stored for a version: the packed file, the recipe of the pushed weights, and other pushed files."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from adapter_store.durable import medium_errors
from adapter_store.errors import AdapterNotFound, DataLoss
from adapter_store.manifest import Manifest
from adapter_store.packed import Weights, write_packed
from adapter_store.peft import WEIGHTS_FILE, PeftAdapter
from adapter_store.recipe import rebuild, write_recipe
from adapter_store.redis_store.index import Index
from adapter_store.redis_store.read import Reader

_PACKED, _RECIPE, _SOURCE = "packed.safetensors", "recipe", "source/"


def prepare(adapter: PeftAdapter, source: Path, folder: Path) -> tuple[Manifest, dict[str, Path]]:
    """The files to store, by stored name; those that are not in `source` are made in `folder`."""
    files = {_PACKED: folder / _PACKED, _RECIPE: folder / _RECIPE}
    with files[_PACKED].open("wb") as packed:
        manifest = write_packed(adapter, packed)
    with files[_RECIPE].open("wb") as recipe:
        write_recipe(adapter, recipe)
    others = [file for file in sorted(source.iterdir()) if file.name != WEIGHTS_FILE]
    return manifest, files | {_SOURCE + file.name: file for file in others}


class Content:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def weights(self, digest: str) -> Weights:
        """Raises AdapterNotFound, DataLoss."""
        return self._reader.whole(digest, self._weights)

    def check(self, digest: str) -> None:
        """Reads and hashes everything. Raises AdapterNotFound, DataLoss."""
        self._reader.whole(digest, lambda manifest, index: self._restore(manifest, index, None))

    def is_whole(self, digest: str) -> bool:
        try:
            self.check(digest)
        except (AdapterNotFound, DataLoss):
            return False
        return True

    def restore(self, digest: str, folder: Path) -> None:
        """Writes the pushed files. Raises AdapterNotFound, DataLoss."""
        self._reader.whole(digest, lambda manifest, index: self._restore(manifest, index, folder))

    def _weights(self, manifest: Manifest, index: Index) -> Weights:
        """In memory that lives as long as the mapping."""
        with self._fetched(index, _PACKED) as packed:
            return Weights(Path(f"/proc/self/fd/{packed.fileno()}"), manifest)

    def _restore(self, manifest: Manifest, index: Index, folder: Path | None) -> None:
        with (
            self._weights(manifest, index) as weights,
            self._fetched(index, _RECIPE) as recipe,
            _writing(folder, WEIGHTS_FILE) as target,
        ):
            rebuild(recipe, weights, target)
        for file in index.files:
            if file.name.startswith(_SOURCE):
                with _writing(folder, file.name.removeprefix(_SOURCE)) as target:
                    self._reader.copy(index, file, target)

    @contextlib.contextmanager
    def _fetched(self, index: Index, name: str) -> Iterator[BinaryIO]:
        """A stored file as one without a name, in memory."""
        with medium_errors(), os.fdopen(os.memfd_create("lorafleet-adapter"), "w+b") as file:
            self._reader.copy(index, index.file(name), file)
            file.seek(0)
            yield file


@contextlib.contextmanager
def _writing(folder: Path | None, name: str) -> Iterator[BinaryIO | None]:
    if folder is None:
        yield None
        return
    with (folder / name).open("wb") as file:
        yield file
