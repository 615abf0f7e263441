"""What is stored for a version: the packed file, the recipe of the pushed one, other pushed files."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from adapter_store.errors import AdapterNotFound, DataLoss
from adapter_store.files.memory import memory
from adapter_store.manifest import Manifest
from adapter_store.packed.arriving import ArrivingWeights
from adapter_store.packed.form import Weights
from adapter_store.packed.packer import Packing
from adapter_store.packed.recipe import rebuild, recipe_pieces
from adapter_store.peft.folder import WEIGHTS_FILE, PeftAdapter
from adapter_store.redis_store.index import Index
from adapter_store.redis_store.read import Reader
from adapter_store.redis_store.upload import Sendable

_PACKED, _RECIPE, _SOURCE = "packed.safetensors", "recipe", "source/"


def prepare(
    adapter: PeftAdapter, source: Path, max_memory_bytes: int, *, check: bool
) -> tuple[Manifest, dict[str, Sendable]]:
    """The files to store, by stored name. `source`, the pushed folder, must stay until they are sent.

    A packed file of at most `max_memory_bytes` is not made twice, for its hashes and to be sent.
    `check`: values are looked at now, not as they are sent. Raises InvalidAdapter.
    """
    packing = Packing(adapter)
    if check:
        packing.check()
    files = {
        _PACKED: Sendable(packing.pieces, in_digest=True),
        _RECIPE: Sendable(lambda: recipe_pieces(adapter)),
    }
    others = [file for file in sorted(source.iterdir()) if file.name != WEIGHTS_FILE]
    manifest = packing.manifest(keep=packing.num_bytes <= max_memory_bytes)
    return manifest, files | {_SOURCE + file.name: Sendable.of_file(file) for file in others}


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
        file = index.file(_PACKED)
        content = memory(file.num_bytes)
        weights = ArrivingWeights(content, manifest)
        self._reader.read(index, file, content, weights.arrived)
        return weights.finish()

    def _restore(self, manifest: Manifest, index: Index, folder: Path | None) -> None:
        recipe = self._fetched(index, _RECIPE)
        with self._weights(manifest, index) as weights, _writing(folder, WEIGHTS_FILE) as target:
            rebuild(recipe, weights, target)
        for file in index.files:
            if file.name.startswith(_SOURCE):
                content = self._fetched(index, file.name)
                with _writing(folder, file.name.removeprefix(_SOURCE)) as target:
                    if target is not None:
                        target.write(content)

    def _fetched(self, index: Index, name: str) -> memoryview:
        file = index.file(name)
        content = memory(file.num_bytes)
        self._reader.read(index, file, content)
        return content


@contextlib.contextmanager
def _writing(folder: Path | None, name: str) -> Iterator[BinaryIO | None]:
    if folder is None:
        yield None
        return
    with (folder / name).open("wb") as file:
        yield file
