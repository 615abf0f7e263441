"""Uploads files as chunks that expire. metadata.py then makes them stay and publishes them."""

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from adapter_store.files.hashing import bulk_hash
from adapter_store.redis_store.index import CHUNK_BYTES, Index, StoredFile
from adapter_store.redis_store.keys import Keys
from adapter_store.redis_store.metadata import Metadata
from adapter_store.redis_store.primary import Primary
from adapter_store.redis_store.transfer import ChunkWriter
from adapter_store.ref import Ref

UPLOAD_SECONDS = 3600  # that an upload may take, and for which a dead one's chunks stay
UNHASHED = ""  # a chunk's hash, where the version's digest speaks for the whole file


@dataclass(frozen=True, slots=True)
class Sendable:
    """A file to store: its bytes in pieces of any size."""

    pieces: Callable[[], Iterable[memoryview]]
    in_digest: bool = False  # the digest covers all of it: its chunks need no hashes of their own

    @classmethod
    def of_file(cls, path: Path) -> "Sendable":
        return cls(lambda: _read(path))


def describe(name: str, file: Sendable) -> StoredFile:
    """The content as `upload` would store it."""
    hashes, num_bytes = list[str](), 0
    for chunk in _chunks(file.pieces()):
        hashes.append(bulk_hash(*chunk))
        num_bytes += sum(map(len, chunk))
    return StoredFile(name, num_bytes, tuple(hashes))


class Uploader:
    def __init__(self, primary: Primary, keys: Keys, metadata: Metadata) -> None:
        self._primary, self._keys, self._metadata = primary, keys, metadata

    def upload(self, digest: str, files: Mapping[str, Sendable], owner: Ref | None = None) -> Index:
        """Everything is stored and claimed, and nobody sees it yet. `owner`: of the files of a push.

        Raises StoreUnavailable."""
        upload, number = uuid.uuid4().hex, 0
        stored = list[StoredFile]()
        with ChunkWriter(self._primary, UPLOAD_SECONDS) as writer:
            for name, file in files.items():
                hashes, num_bytes = list[str](), 0
                for chunk in _chunks(file.pieces()):
                    writer.write(self._keys.chunk(digest, upload, number), chunk)
                    hashes.append(UNHASHED if file.in_digest else bulk_hash(*chunk))
                    number, num_bytes = number + 1, num_bytes + sum(map(len, chunk))
                stored.append(StoredFile(name, num_bytes, tuple(hashes)))
            writer.finish()
        index = Index(digest, upload, tuple(stored), CHUNK_BYTES)
        self._metadata.claim(index.claim, owner)
        return index


def _chunks(pieces: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The pieces cut and gathered: CHUNK_BYTES in each, but for the last one."""
    chunk, room = list[memoryview](), CHUNK_BYTES
    for piece in pieces:
        while len(piece) >= room:
            yield [*chunk, piece[:room]]
            piece, chunk, room = piece[room:], [], CHUNK_BYTES
        if piece:
            chunk.append(piece)
            room -= len(piece)
    if chunk:
        yield chunk


def _read(path: Path) -> Iterator[memoryview]:
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            yield memoryview(data)
