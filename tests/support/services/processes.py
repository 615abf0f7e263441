"""What the system says of processes that a test did not start itself."""

from contextlib import suppress
from pathlib import Path


def is_running(pid: int) -> bool:
    """Not one that has ended and waits for its parent to ask."""
    try:
        return _state_and_parent(Path(f"/proc/{pid}"))[0] != "Z"
    except OSError:
        return False


def children(parent: int, command: str = "") -> list[int]:
    """Of all its threads; `command`: part of their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            _, its_parent = _state_and_parent(folder)
            if its_parent == parent and command.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def environment(pid: int) -> dict[str, str]:
    """That it was started with; empty when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def _state_and_parent(folder: Path) -> tuple[str, int]:
    state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
    return state, int(parent)
