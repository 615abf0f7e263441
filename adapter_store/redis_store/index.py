"""What one upload holds: files cut into chunks, numbered through all of them."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from adapter_store.errors import DataLoss

CHUNK_BYTES = 4 << 20  # a few milliseconds of the server's only thread; other users get in between


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
    chunks: tuple[str, ...]  # hex sha256 of each

    def chunk_bytes(self, number: int) -> int:
        return min(CHUNK_BYTES, self.num_bytes - number * CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class Index:
    digest: str
    upload: str
    files: tuple[StoredFile, ...]

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
            return cls(fields["digest"], fields["upload"], tuple(files))
        except (ValueError, TypeError, KeyError) as error:
            raise DataLoss(f"a stored index is damaged: {error!r}") from error
