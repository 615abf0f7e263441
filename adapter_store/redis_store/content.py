"""What is stored: for a version the packed file, for a push its files and the weights' recipe."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adapter_store.errors import AdapterNotFound, DataLoss
from adapter_store.files.memory import memory
from adapter_store.manifest import Manifest
from adapter_store.packed.arriving import ArrivingWeights
from adapter_store.packed.form import Weights
from adapter_store.packed.packer import Packing
from adapter_store.packed.recipe import recipe_pieces
from adapter_store.peft.folder import WEIGHTS_FILE, PeftAdapter
from adapter_store.pushed import PushedFiles
from adapter_store.redis_store.index import Index, StoredFile
from adapter_store.redis_store.read import Reader
from adapter_store.redis_store.upload import Sendable, describe
from adapter_store.ref import Ref

_PACKED, _RECIPE, _SOURCE = "packed.safetensors", "recipe", "source/"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What there is to store, by stored name: the content, and the files of this push of it."""

    manifest: Manifest
    content: Mapping[str, Sendable]
    pushed: Mapping[str, Sendable]


def prepare(
    adapter: PeftAdapter, source: Path, max_memory_bytes: int, digest: str | None, *, check: bool
) -> Prepared:
    """`source`, the pushed folder, must stay until all is sent.

    A packed file of at most `max_memory_bytes` is not made twice, for its hashes and to be sent.
    `check`: values are looked at now, not as they are sent. Raises InvalidAdapter.
    """
    packing = Packing(adapter, digest)
    if check:
        packing.check()
    others = [file for file in sorted(source.iterdir()) if file.name != WEIGHTS_FILE]
    pushed = {_RECIPE: Sendable(lambda: recipe_pieces(adapter))}
    pushed |= {_SOURCE + file.name: Sendable.of_file(file) for file in others}
    manifest = packing.manifest(keep=packing.num_bytes <= max_memory_bytes)
    return Prepared(manifest, {_PACKED: Sendable(packing.pieces, in_digest=True)}, pushed)


class Content:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def weights(self, digest: str) -> Weights:
        """Raises AdapterNotFound, DataLoss."""
        return self._reader.whole(digest, self._weights)

    def is_whole(self, digest: str) -> bool:
        """Reads and hashes everything."""
        try:
            self.weights(digest).close()
        except (AdapterNotFound, DataLoss):
            return False
        return True

    def pushed(self, ref: Ref, files: str) -> PushedFiles:
        """The pushed files of the version in `ref`, as this name pushed it. Raises DataLoss."""
        index = self._reader.push(ref, files)
        found = {file.name: self._fetched(index, file) for file in index.files}
        return PushedFiles(
            found.pop(_RECIPE), {name.removeprefix(_SOURCE): content for name, content in found.items()}
        )

    def has_pushed(self, ref: Ref, files: str, pushed: Mapping[str, Sendable]) -> bool:
        """Whether what is stored are these files, and whole."""
        try:
            stored = self._reader.push(ref, files)
            for file in stored.files:
                self._fetched(stored, file)
        except DataLoss:
            return False
        return stored.files == tuple(describe(name, file) for name, file in pushed.items())

    def _weights(self, manifest: Manifest, index: Index) -> Weights:
        file = index.file(_PACKED)
        content = memory(file.num_bytes)
        weights = ArrivingWeights(content, manifest)
        self._reader.read(index, file, content, weights.arrived)
        return weights.finish()

    def _fetched(self, index: Index, file: StoredFile) -> memoryview:
        content = memory(file.num_bytes)
        self._reader.read(index, file, content)
        return content
