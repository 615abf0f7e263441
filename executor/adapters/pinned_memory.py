"""Makes large pinned memory without holding up those who work with the GPU meanwhile.

cudaHostAlloc keeps every other thread from the driver while the system finds and clears each page, 0.7 s a
GiB: beside 28 GiB of it a model took 17 s to load that takes less than one alone. So pages are found first,
large ones by several threads, and the driver pins what is there.
"""

import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch

from executor.lora.image import Buffer

_THREADS = 4


def present_memory(size: int) -> Buffer:
    """uint8 [size], zeros, whose pages are there: large ones where the system has them. Not there in forked
    processes. Raises OSError."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A page that a forked process shares moves at the next write, and the GPU would still read the old one.
    memory.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    array: Buffer = np.frombuffer(memory, np.uint8)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda part: part.fill(0), np.array_split(array, _THREADS)))
    return array


def pin(array: Buffer, device: torch.device) -> None:
    """Pins it for as long as the array lives, views of it included. Raises RuntimeError when the driver
    refuses."""
    address = array.ctypes.data
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        torch.cuda.check_error(runtime.cudaHostRegister(address, array.nbytes, 0))
    weakref.finalize(array, runtime.cudaHostUnregister, address).atexit = False
