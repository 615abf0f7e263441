"""What one upload holds: files cut into chunks, numbered through all of them."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from adapter_store.errors import DataLoss

# Of new uploads: a millisecond of the server's only thread, in which other users get in between. Values of
# 4 MiB cost it half as much again for each byte: they and their copies come from fresh pages every time.
CHUNK_BYTES = 2 << 20
_UNTOLD_CHUNK_BYTES = 4 << 20  # of uploads whose index does not say


@dataclass(frozen=True, slots=True)
class Claim:
    """Enough to find all chunks of an upload, published or not."""

    digest: str
    upload: str
    num_chunks: int

    def __str__(self) -> str:
        return f"{self.digest} {self.upload} {self.num_chunks}"

    @classmethod
    def parse(cls, text: str) -> "Claim":
        digest, upload, num_chunks = text.split(" ")
        return cls(digest, upload, int(num_chunks))


@dataclass(frozen=True, slots=True)
class StoredFile:
    name: str
    num_bytes: int
    chunks: tuple[str, ...]  # bulk_hash of each


@dataclass(frozen=True, slots=True)
class Index:
    digest: str
    upload: str
    files: tuple[StoredFile, ...]
    chunk_bytes: int  # but for the last chunk of a file

    @property
    def claim(self) -> Claim:
        return Claim(self.digest, self.upload, sum(len(file.chunks) for file in self.files))

    def file(self, name: str) -> StoredFile:
        return next(file for file in self.files if file.name == name)

    def numbers(self, file: StoredFile) -> Iterator[int]:
        """The numbers of a file's chunks."""
        first = 0
        for each in self.files:
            if each == file:
                break
            first += len(each.chunks)
        return iter(range(first, first + len(file.chunks)))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Index":
        """Raises DataLoss."""
        try:
            fields = json.loads(text)
            files = [StoredFile(f["name"], f["num_bytes"], tuple(f["chunks"])) for f in fields["files"]]
            chunk_bytes = int(fields.get("chunk_bytes", _UNTOLD_CHUNK_BYTES))
            return cls(fields["digest"], fields["upload"], tuple(files), chunk_bytes)
        except (ValueError, TypeError, KeyError) as error:
            raise DataLoss(f"a stored index is damaged: {error!r}") from error
