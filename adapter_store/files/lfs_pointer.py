"""Pointers of Git LFS: what a clone without it has in place of a large file, under that file's name."""

from pathlib import Path

_START = b"version https://git-lfs"
WHAT_IT_IS = "a Git LFS pointer, not the file itself, which `git lfs pull` fetches"


def is_pointer(start: bytes) -> bool:
    """Whether a file that begins with these bytes is one. 8 are enough."""
    return len(start) >= 8 and (start.startswith(_START) or _START.startswith(start))


def is_pointer_file(path: Path) -> bool:
    """Raises OSError."""
    with path.open("rb") as file:
        return is_pointer(file.read(len(_START)))
