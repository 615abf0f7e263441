"""Adapters in archives: only an adapter's own files are taken out, and only up to a limit of bytes.

A member's path never decides where anything is written: files are taken by their plain name, from the top of
the archive or from the one folder in it.
"""

import contextlib
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from lorafleet.errors import invalid
from lorafleet.transfer import ADAPTER_FILES, UNSERVED_FILES, unserved

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz")
MAX_BYTES = 16 << 30


def is_archive(path: Path) -> bool:
    return path.is_file() and path.name.endswith(SUFFIXES)


@contextlib.contextmanager
def unpacked(path: Path, max_bytes: int = MAX_BYTES) -> Iterator[Path]:
    """The adapter in an archive as a folder that is gone afterwards. Raises InvalidRequest, OSError."""
    with tempfile.TemporaryDirectory(prefix="lorafleet-push-") as folder:
        left = max_bytes
        with _members(path) as members:
            for name, stream in members:
                with (Path(folder) / name).open("xb") as file:
                    left -= _copy(stream, file, left, path)
        yield Path(folder)


@contextlib.contextmanager
def _members(path: Path) -> Iterator[Iterator[tuple[str, IO[bytes]]]]:
    try:
        if path.name.endswith(".zip"):
            with zipfile.ZipFile(path) as zipped:
                files = [info.filename for info in zipped.infolist() if not info.is_dir()]
                yield ((name, zipped.open(file)) for name, file in _wanted(path, files))
        else:
            with tarfile.open(path) as tar:
                kinds = {member.name: member for member in tar if member.isreg()}
                found = _wanted(path, list(kinds))
                streams = ((name, tar.extractfile(kinds[file])) for name, file in found)
                yield ((name, stream) for name, stream in streams if stream is not None)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, RuntimeError, NotImplementedError) as error:
        raise invalid(path.name, f"is no archive that can be read: {error}") from error


def _wanted(path: Path, files: list[str]) -> list[tuple[str, str]]:
    """(plain name, member) of each file of the adapter. Raises InvalidRequest when a name is there twice."""
    found: dict[str, str] = {}
    for file in files:
        parts = PurePosixPath(file).parts
        if len(parts) <= 2 and parts and parts[-1] in UNSERVED_FILES:
            raise unserved(parts[-1])
        if len(parts) <= 2 and parts and parts[-1] in ADAPTER_FILES and ".." not in parts:
            if parts[-1] in found:
                raise invalid(path.name, f"has {parts[-1]} twice")
            found[parts[-1]] = file
    return list(found.items())


def _copy(stream: IO[bytes], file: IO[bytes], left: int, path: Path) -> int:
    """Bytes copied. Raises InvalidRequest beyond `left`."""
    before = file.tell()
    while data := stream.read(1 << 20):
        if file.tell() - before + len(data) > left:
            raise invalid(path.name, "unpacks to more than is allowed")
        file.write(data)
    stream.close()
    return file.tell() - before
