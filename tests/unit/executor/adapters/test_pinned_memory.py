import gc
import mmap
import signal
import subprocess
import sys

import pytest
import torch

from executor.adapters.pinned_memory import pin, present_memory


@pytest.mark.parametrize("size", [1, mmap.PAGESIZE + 1, 5 << 20])
def test_it_is_zeros_of_its_own(size: int) -> None:
    first, second = present_memory(size), present_memory(size)
    assert len(first) == size and not first.any()
    first.fill(7)
    assert not second.any()


FORKED = """
import os
from executor.adapters.pinned_memory import present_memory
memory = present_memory(1 << 20)
if not (child := os.fork()):
    memory[0] = 1
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_forked_processes_share_no_page_of_it() -> None:
    """Which the next write here would move away from where the driver pinned it."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
    assert int(done.stdout) == -signal.SIGSEGV


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(OSError):
        present_memory(1 << 62)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_is_pinned_as_long_as_somebody_uses_it() -> None:
    """Memory at the same address, which is likely to come again, can be pinned again afterwards."""
    device = torch.device("cuda")
    for value in range(20):
        whole = present_memory(64 << 20)
        pin(whole, device)
        part = torch.from_numpy(whole).numpy()[5 << 20 :][: 1 << 20]
        del whole
        gc.collect()
        tensor = torch.from_numpy(part).fill_(value)
        assert tensor.is_pinned()
        copy = tensor.to(device, non_blocking=True)
        assert bool((copy == value).all())
        del part, tensor
        gc.collect()
