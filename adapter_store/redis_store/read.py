"""Reads chunks into files in memory; what the version's digest does not cover, their hashes do."""

from collections.abc import Callable
from typing import TypeVar

from adapter_store.errors import AdapterNotFound, DataLoss
from adapter_store.files.hashing import bulk_hash
from adapter_store.manifest import Manifest
from adapter_store.redis_store.index import Index, StoredFile
from adapter_store.redis_store.keys import Keys
from adapter_store.redis_store.metadata import Metadata
from adapter_store.redis_store.primary import Primary
from adapter_store.redis_store.transfer import read_chunks
from adapter_store.redis_store.upload import UNHASHED
from adapter_store.ref import Ref

_T = TypeVar("_T")


class Reader:
    def __init__(self, primary: Primary, keys: Keys, metadata: Metadata) -> None:
        self._primary, self._keys, self._metadata = primary, keys, metadata

    def whole(self, digest: str, read: Callable[[Manifest, Index], _T]) -> _T:
        """`read` of an upload that is published. A chunk that is missing may have moved to another upload.

        Raises AdapterNotFound, DataLoss.
        """
        tried: str | None = None
        while True:
            found = self._metadata.index(digest)
            if found is None:
                raise AdapterNotFound(f"adapter version {digest} was not found")
            manifest, index = found
            if manifest.digest != digest or index.digest != digest:
                raise DataLoss(f"the content stored as {digest} is {manifest.digest}")
            try:
                return read(manifest, index)
            except DataLoss:
                if index.upload == tried:
                    raise
                tried = index.upload

    def push(self, ref: Ref, files: str) -> Index:
        """The push of the pushed files of the version in `ref`. Raises DataLoss."""
        index = self._metadata.push(ref, files)
        if index is None or index.digest != ref.digest:
            raise DataLoss(f"the pushed files of {ref} are gone: push the adapter again")
        return index

    def read(
        self,
        index: Index,
        file: StoredFile,
        target: memoryview,
        arrived: Callable[[int, int], None] = lambda begin, end: None,
    ) -> None:
        """A stored file into `target`; `arrived` is told which bytes of it are there now, by several threads.

        Raises DataLoss.
        """
        size = index.chunk_bytes
        pieces = [target[start : start + size] for start in range(0, len(target), size)]
        keys = [self._keys.chunk(index.digest, index.upload, number) for number in index.numbers(file)]

        def check(number: int) -> None:
            expected = file.chunks[number]
            if expected != UNHASHED and bulk_hash(pieces[number]) != expected:
                raise _loss(index, file, "no longer matches its hash")
            arrived(number * size, number * size + len(pieces[number]))

        try:
            read_chunks(self._primary, keys, pieces, check)
        except LookupError as error:
            raise _loss(index, file, "is gone") from error


def _loss(index: Index, file: StoredFile, state: str) -> DataLoss:
    return DataLoss(f"a part of {file.name} of {index.digest} {state}: push the adapter again")
