import gc
import mmap

import pytest
import torch

from executor.pinned_memory import pin, present_memory


@pytest.mark.parametrize("size", [1, mmap.PAGESIZE + 1, 5 << 20])
def test_it_is_zeros_of_its_own(size: int) -> None:
    first, second = present_memory(size), present_memory(size)
    assert len(first) == size and not first.any()
    first.fill(7)
    assert not second.any()


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
