"""Files that survive a crash whole (write aside, sync, rename, sync the folder), and file locks."""

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from adapter_store.errors import StoreUnavailable


@contextlib.contextmanager
def medium_errors() -> Iterator[None]:
    """The disk's own failures become StoreUnavailable. Clients read its text, so it names no path."""
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"the store's disk failed: {error.strerror or error}") from error


def sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_tree(path: Path) -> None:
    """Everything in `path`, then `path` itself."""
    for entry in path.iterdir():
        sync_tree(entry) if entry.is_dir() else sync_file(entry)
    sync_folder(path)


def replace_file(path: Path, content: bytes, aside: Path, *, mode: int = 0o666) -> None:
    """`aside` is a folder on the same file system, where a crash may leave a half-written file. `mode` is as
    for open(2)."""
    temporary = aside / uuid.uuid4().hex
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    sync_file(temporary)
    temporary.rename(path)
    sync_folder(path.parent)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Held by one thread of one process at a time; a killed holder lets go by itself."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@contextlib.contextmanager
def exclusive_if_free(path: Path) -> Iterator[bool]:
    """The same as `exclusive`, without waiting: False when somebody else holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)  # and what is held goes with it


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Marks a folder as being worked in, for as long as this process lives at most."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def remove_unclaimed(aside: Path) -> None:
    """Clears what crashes left in `aside`: all files, and folders that nobody works in."""
    for entry in aside.iterdir():
        if not entry.is_dir():
            entry.unlink(missing_ok=True)
            continue
        descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)
