"""Fresh memory for whole files, and a read of a file into it on all cores."""

import contextlib
import mmap
import os
from pathlib import Path

from adapter_store.files.cores import on_all_cores
from adapter_store.files.safetensors_file import open_regular

_SPAN_BYTES = 8 << 20  # read by one thread at a time


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
    with open_regular(path) as file:

        def read(start: int) -> None:
            done, end = start, min(start + _SPAN_BYTES, len(content))
            while done < end:
                if (count := os.preadv(file.fileno(), [content[done:end]], done)) == 0:
                    raise OSError(f"{path.name} shrank while it was read")
                done += count

        on_all_cores(read, range(0, len(content), _SPAN_BYTES))
    return content
