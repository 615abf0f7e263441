"""From chunks to files. Each chunk is checked against the hash that the index has for it."""

import hashlib
from collections.abc import Callable
from typing import BinaryIO, TypeVar

from adapter_store.errors import AdapterNotFound, DataLoss
from adapter_store.manifest import Manifest
from adapter_store.redis_store.index import Index, StoredFile
from adapter_store.redis_store.keys import Keys
from adapter_store.redis_store.metadata import Metadata
from adapter_store.redis_store.primary import Primary

_BATCH_CHUNKS = 2  # asked for in one go: one is on its way while the other is hashed
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

    def copy(self, index: Index, file: StoredFile, target: BinaryIO | None = None) -> None:
        """Writes a stored file to `target`, from where that stands; None: only checks. Raises DataLoss."""
        numbers = list(index.numbers(file))
        for start in range(0, len(numbers), _BATCH_CHUNKS):
            page = numbers[start : start + _BATCH_CHUNKS]
            keys = [self._keys.chunk(index.digest, index.upload, number) for number in page]
            replies = self._primary.run(*(("GET", key) for key in keys))
            for expected, data in zip(file.chunks[start:], replies, strict=False):
                if data is None or hashlib.sha256(data).hexdigest() != expected:
                    state = "is gone" if data is None else "no longer matches its hash"
                    raise DataLoss(f"a part of {file.name} of {index.digest} {state}: push the adapter again")
                if target is not None:
                    target.write(data)
