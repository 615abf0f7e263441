"""Fresh memory for whole files."""

import contextlib
import mmap
from pathlib import Path

from adapter_store.safetensors_file import open_regular


def memory(num_bytes: int) -> memoryview:
    """In huge pages where the system has them: half the time of a load was page faults."""
    if num_bytes == 0:
        return memoryview(b"")
    area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)


def read_file(path: Path) -> memoryview:
    """A copy: what happens to the file afterwards changes nothing. OSError passes through."""
    content = memory(path.stat().st_size)
    done = 0
    with open_regular(path) as file:
        while done < len(content):
            if (count := file.readinto(content[done:])) == 0:  # type: ignore[attr-defined]
                raise OSError(f"{path.name} shrank while it was read")
            done += count
    return content
