"""Disks that fill while a service writes to them: small file systems, or a limit of the kernel's."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

SIZE = "32m"
_BLOCK = b"\0" * 65536


class Disk(Protocol):
    folder: Path

    def full(self, writer: int) -> AbstractContextManager[None]:
        """For the process of that number, and while the block runs."""


class SmallDisk:
    """A mounted file system, which is full when another file takes all that is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def full(self, writer: int) -> Iterator[None]:
        ballast = self.folder / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file:
                while _took(file.write, _BLOCK):
                    pass
                while _took(file.write, b"\0"):
                    pass
            yield
        finally:
            ballast.unlink()


class FullByLimit:
    """Where nobody may mount: the process may write no more to any file, as with a quota that is used up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def full(self, writer: int) -> Iterator[None]:
        before = resource.prlimit(writer, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        try:
            yield
        finally:
            resource.prlimit(writer, resource.RLIMIT_FSIZE, before)


@contextmanager
def small_disk(folder: Path) -> Iterator[Disk]:
    """A tmpfs where that may be mounted."""
    folder.mkdir(parents=True)
    mount = ("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder))
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        yield FullByLimit(folder)
        return
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(("umount", "--lazy", str(folder)), check=True)


def _took(write: object, data: bytes) -> bool:
    try:
        return bool(write(data))  # type: ignore[operator]
    except OSError:
        return False
