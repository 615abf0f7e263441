"""From files to chunks that expire, then to chunks that stay. Publishing them is the metadata's part."""

import hashlib
import logging
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from adapter_store.errors import StoreUnavailable
from adapter_store.redis_store.index import CHUNK_BYTES, Index, StoredFile
from adapter_store.redis_store.keys import Keys
from adapter_store.redis_store.metadata import Metadata
from adapter_store.redis_store.primary import Command, Primary

UPLOAD_SECONDS = 3600  # that an upload may take, and for which a dead one's chunks stay
_BATCH_CHUNKS = 4  # sent in one go: what an upload holds in memory
_BATCH_KEYS = 512
_log = logging.getLogger(__name__)


class Uploader:
    def __init__(self, primary: Primary, keys: Keys, metadata: Metadata) -> None:
        self._primary, self._keys, self._metadata = primary, keys, metadata

    def upload(self, digest: str, files: Mapping[str, Path]) -> Index:
        """Everything is stored and claimed, and nobody sees it yet. Raises StoreUnavailable."""
        upload = uuid.uuid4().hex
        stored, batch, number = list[StoredFile](), list[Command](), 0
        for name, path in files.items():
            chunks, num_bytes = list[str](), 0
            for data in _chunks(path):
                key = self._keys.chunk(digest, upload, number)
                # NX: a repetition that arrives late must not make a chunk expire that is permanent by then.
                batch.append(("SET", key, data, "EX", UPLOAD_SECONDS, "NX"))
                chunks.append(hashlib.sha256(data).hexdigest())
                number, num_bytes = number + 1, num_bytes + len(data)
                if len(batch) == _BATCH_CHUNKS:
                    self._primary.run(*batch)
                    batch.clear()
            stored.append(StoredFile(name, num_bytes, tuple(chunks)))
        self._primary.run(*batch)
        index = Index(digest, upload, tuple(stored))
        self._metadata.claim(index.claim)
        self._keep(index)
        return index

    def _keep(self, index: Index) -> None:
        keys = [self._keys.chunk(index.digest, index.upload, n) for n in range(index.claim.num_chunks)]
        for start in range(0, len(keys), _BATCH_KEYS):
            page = keys[start : start + _BATCH_KEYS]
            *_, there = self._primary.run(
                *(("PERSIST", key) for key in page), ("EXISTS", *page), durable=True
            )
            if there != len(page):
                raise StoreUnavailable("the store's Redis lost a part of the upload: push the adapter again")


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            yield data
