"""Adapters in archives: an adapter's own files, all of one folder, up to a limit of bytes.

Zip files are taken, and tar files, plain or compressed with gzip, bzip2 or xz: by what they hold, whatever
their names are. A member's path never decides where anything is written: it only says which members lie in
one folder.
"""

import contextlib
import lzma
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from lorafleet.errors import invalid
from lorafleet.foreign import CONVERTIBLE_FILES, foreign_file
from lorafleet.transfer import ADAPTER_FILES, CONFIG_FILE, UNSERVED_FILES, WEIGHTS_FILE, few, unserved

MAX_BYTES = 16 << 30
# What the name of an archive may end with, for whoever looks for archives in a folder. Those of the last line
# are refused, which is better than to pass over them without a word.
SUFFIXES = (
    *(".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz"),
    *(".tar.zst", ".tzst", ".7z", ".rar"),
)
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_NOT_TAKEN = {
    b"7z\xbc\xaf\x27\x1c": "is a 7z archive",
    b"Rar!\x1a\x07": "is a RAR archive",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd",
}
_INSTEAD = "unpack it and push the folder"
_HOLDERS = {WEIGHTS_FILE, *CONVERTIBLE_FILES}


@dataclass(frozen=True, slots=True)
class _Member:
    folder: PurePosixPath  # "." is the top
    name: str
    flaw: str  # why its bytes are not taken; empty for a plain file
    open: Callable[[], IO[bytes] | None]


def archive_stem(name: str) -> str | None:
    """The name without its suffix; None when it does not end as an archive's does."""
    found = [suffix for suffix in SUFFIXES if name.lower().endswith(suffix)]
    return name[: -len(max(found, key=len))] if found else None


@contextlib.contextmanager
def adapter_folder(path: Path, max_bytes: int = MAX_BYTES) -> Iterator[Path]:
    """`path` itself unless it is a file: then the adapter in that archive, as a folder that is gone
    afterwards. Raises InvalidRequest, OSError."""
    if not path.is_file():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="lorafleet-push-") as folder:
        with contextlib.ExitStack() as stack:
            left = max_bytes
            for member in _adapter_in(path.name, _members(path, stack)):
                with (Path(folder) / member.name).open("xb") as file:
                    left -= _copy(member, file, left, path.name)
        yield Path(folder)


def _members(path: Path, stack: contextlib.ExitStack) -> Sequence[_Member]:
    """Everything but folders, to be read until the stack closes."""
    with path.open("rb") as file:
        start = file.read(8)
    for magic, what in _NOT_TAKEN.items():
        if start.startswith(magic):
            raise invalid(path.name, f"{what}, which is not taken: {_INSTEAD}")
    with _reading(path.name):
        if start.startswith(_ZIP):
            zipped = stack.enter_context(zipfile.ZipFile(path))
            return [_zip_member(zipped, info) for info in zipped.infolist() if not info.is_dir()]
        try:
            tar = stack.enter_context(tarfile.open(path))  # noqa: SIM115  the stack closes it
        except tarfile.ReadError:
            what = foreign_file([path.name]) or f"{path.name} is no folder and no zip or tar archive"
            raise invalid(path.name, f"cannot be pushed: {what}") from None
        return [_tar_member(tar, info) for info in tar if not info.isdir()]


def _zip_member(zipped: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    place = PurePosixPath(info.filename.replace("\\", "/"))  # as old zippers of Windows write it
    encrypted, link = info.flag_bits & 1, stat.S_ISLNK(info.external_attr >> 16)
    flaw = "is encrypted" if encrypted else "is a link" if link else ""
    return _Member(place.parent, place.name, flaw, lambda: zipped.open(info))


def _tar_member(tar: tarfile.TarFile, info: tarfile.TarInfo) -> _Member:
    place = PurePosixPath(info.name)
    flaw = "" if info.isreg() else "is a link or a special file"
    return _Member(place.parent, place.name, flaw, lambda: tar.extractfile(info))


def _adapter_in(archive: str, members: Sequence[_Member]) -> Sequence[_Member]:
    """The files of the archive's one adapter. Raises InvalidRequest, also for parts in several folders."""
    home = _home(archive, members)
    found: dict[str, _Member] = {}
    for member in members:
        if member.folder != home:
            continue
        if member.name in UNSERVED_FILES:
            raise unserved(member.name)
        if member.name in ADAPTER_FILES:
            if member.name in found:
                raise invalid(archive, f"has {member.name} twice in {_shown(home)}")
            if member.flaw:
                raise invalid(archive, f"{member.name} {member.flaw}, which is not taken: {_INSTEAD}")
            found[member.name] = member
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if name not in found:
            raise invalid(name, f"is missing in {_shown(home)} of {archive}{_why(name, home, members)}")
    return list(found.values())


def _home(archive: str, members: Sequence[_Member]) -> PurePosixPath:
    """The folder that holds the adapter: the one with weights, or the one that all others with weights lie
    in, as a trainer's checkpoints do."""
    holders = sorted({each.folder for each in members if each.name in _HOLDERS}, key=lambda f: len(f.parts))
    if not holders:
        hint = foreign_file(each.name for each in members)
        raise invalid(WEIGHTS_FILE, f"is missing in {archive}" + (hint and f"; {hint}"))
    if not all(folder.is_relative_to(holders[0]) for folder in holders):
        shown = few([_shown(folder) for folder in sorted(holders)])
        raise invalid(archive, f"holds adapters in {shown}: unpack it and push one of these folders")
    return holders[0]


def _why(name: str, home: PurePosixPath, members: Sequence[_Member]) -> str:
    elsewhere = sorted({member.folder for member in members if member.name == name})
    if elsewhere:
        shown = few([_shown(folder) for folder in elsewhere])
        return f"; there is one in {shown}, but an adapter's files lie in one folder"
    hint = foreign_file(member.name for member in members if member.folder == home)
    return hint and f"; {hint}"


def _shown(folder: PurePosixPath) -> str:
    return f"{folder}/" if folder.parts else "the top folder"


def _copy(member: _Member, file: IO[bytes], left: int, archive: str) -> int:
    """Bytes copied. Raises InvalidRequest beyond `left`."""
    copied = 0
    with _reading(archive):
        stream = member.open()
    while stream is not None:
        with _reading(archive):
            data = stream.read(1 << 20)
        if not data:
            stream.close()
            break
        copied += len(data)
        if copied > left:
            raise invalid(archive, "unpacks to more than is allowed")
        file.write(data)
    return copied


@contextlib.contextmanager
def _reading(archive: str) -> Iterator[None]:
    """Around what the archive's own bytes decide: damage and forms that no library here reads."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # of the disk; decompressors set none
            raise
        raise invalid(archive, f"cannot be read ({error}): {_INSTEAD}") from error
    except (
        *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError),
        *(EOFError, RuntimeError, NotImplementedError, ValueError),
    ) as error:
        raise invalid(archive, f"cannot be read ({error}): {_INSTEAD}") from error
