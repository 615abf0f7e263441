"""The wrappers with FP8 slots: the Triton form equals the reference, for dense layers, embedding and head."""

import pytest
import torch

from kernels.metadata.meta import LoRAMapping
from kernels.punica import PunicaWrapperBase, PunicaWrapperCPU

punica_gpu = pytest.importorskip("kernels.punica_gpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, COLUMNS, MAX_RANK = 96, (64, 48, 32), 16
STARTS = (0, 64, 112)
RUNS = ((0, 3), (-1, 2), (2, 1), (1, 4))
# float16: the interpreter's product of bfloat16 is wrong.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def stack(widths: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Views of one arena, with leftovers behind a slot's rank."""
    arena = torch.randn(3, MAX_RANK * sum(widths)).to(dtype)
    ends = [MAX_RANK * sum(widths[: number + 1]) for number in range(len(widths))]
    return [
        arena[:, end - MAX_RANK * width : end].unflatten(1, (MAX_RANK, width))
        for end, width in zip(ends, widths, strict=True)
    ]


def moved(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """To the device, still views of one arena."""
    if DEVICE == "cpu":
        return tensors
    whole = torch.cat([tensor.flatten(1).view(torch.uint8) for tensor in tensors], 1).to(DEVICE)
    parts = whole.split([tensor[0].numel() for tensor in tensors], dim=1)
    return [
        part.unflatten(1, tensor.shape[1:]).view(tensor.dtype)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_slots(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = stack((WIDTH,) * 3, dtype), stack(COLUMNS, dtype)
    ranks = torch.tensor([[3, 16, 0], [0, 5, 8], [7, 1, 4]], dtype=torch.int32)
    scales = torch.rand(3, 3) * 0.01 + 0.01
    x, y = torch.randn(10, WIDTH).to(DTYPE), torch.randn(10, sum(COLUMNS)).to(DTYPE)
    tokens = torch.randint(0, WIDTH, (10,))
    results = []
    for wrapper, device in ((PunicaWrapperCPU, "cpu"), (punica_gpu.PunicaWrapperGPU, DEVICE)):
        punica: PunicaWrapperBase = wrapper(3, 64, device)
        punica.update_metadata(LoRAMapping(RUNS, RUNS))
        own = list if device == "cpu" else moved
        left, right, tables = own(a), own(b), (ranks.to(device), scales.to(device))
        out, head = y.to(device, copy=True), y[:, : COLUMNS[0]].to(device, torch.float32, copy=True)
        embedded = head.clone()
        punica.add_lora_linear(out, x.to(device), left, right, *tables, STARTS)
        first = left[0], right[0], tables[0][:1], tables[1][:1]
        punica.add_lora_logits(head, x.to(device), *first)
        punica.add_lora_embedding(embedded, tokens.to(device), *first)
        results.append((out.float().cpu(), head.cpu(), embedded.cpu()))
    for got, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=2e-2)
    assert torch.equal(results[1][0][3:5], y[3:5].float())
    for got in results[1]:
        assert not torch.allclose(got[:3], y[:3, : got.shape[1]].float(), atol=0.05)
