"""Parts of a capture, with calls between them."""

import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from executor.gpu.cuda_graphs import Capture, GraphMemory, unowned, without_collection

NUMBERS = 1 << 20


def test_an_unowned_tensor_has_the_elements_and_not_the_memory() -> None:
    array = np.arange(24, dtype=np.float32)
    memory, owner = weakref.ref(array), torch.from_numpy(array)
    columns = owner.view(4, 6)[1:, 2:4]
    alias = unowned(columns)
    assert torch.equal(alias, columns) and alias.stride() == columns.stride()
    alias += 1
    assert columns[0].tolist() == [9.0, 10.0]
    del array, owner, columns
    assert memory() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_the_parts_of_a_capture_share_their_memory() -> None:
    """Twenty parts, each with a call behind it: their memory is that of a few."""
    given = torch.ones(NUMBERS, device="cuda")

    def add_one(out: Tensor, x: Tensor) -> None:
        torch.add(x, 1, out=out)

    def run(capture: Capture) -> Tensor:
        x = given * 2
        for _ in range(20):
            out = torch.empty_like(x)
            capture.call_between(partial(add_one, unowned(out), unowned(x)))
            x = out * 2
        return x

    add_one(torch.empty_like(given), given * 2)  # loaded before the capture
    memory = GraphMemory(given.device)
    before = torch.cuda.memory_reserved()
    with without_collection():
        captured = memory.capture(run)
    assert torch.cuda.memory_reserved() - before < 8 * given.nbytes + (20 << 20)
    for value in (1.0, 3.0):
        given.fill_(value)
        captured.replay()
        expected = 2 * value
        for _ in range(20):
            expected = 2 * (expected + 1)
        assert captured.out.min().item() == captured.out.max().item() == expected
