"""The reference API's dense operations in plain torch: the truth of the kernels, and for CPU tensors."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.vllm.dense.step import Step


def shrink(output: Tensor, x: Tensor, lora_a: Sequence[Tensor], step: Step, scale: float) -> None:
    """The contract is that of kernels/vllm/lora_shrink.py."""
    output.zero_()
    for slot, rows in groups(step, lora_a[0].shape[0]):
        for s, weight in enumerate(lora_a):
            product = x[rows].float() @ _matrix(weight, slot).float().T
            output[s, rows] = (product * scale).to(output.dtype)


def expand(
    output: Tensor, h: Tensor, lora_b: Sequence[Tensor], step: Step, offset: int, *, add_inputs: bool
) -> None:
    """The contract is that of kernels/vllm/lora_expand.py."""
    for slot, rows in groups(step, lora_b[0].shape[0]):
        start = offset
        for s, weight in enumerate(lora_b):
            columns = slice(start, start := start + weight.shape[-2])
            delta = h[s, rows].to(weight.dtype).float() @ _matrix(weight, slot).float().T
            if add_inputs:
                delta += output[rows, columns].float()
            output[rows, columns] = delta.to(output.dtype)


def add_pair(
    y: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    step: Step,
    scale: float,
    *,
    add_inputs: bool,
) -> None:
    shape = len(lora_a), x.shape[0], lora_a[0].shape[-2]
    h = torch.empty(shape, dtype=torch.float32, device=x.device)
    shrink(h, x, lora_a, step, scale)
    expand(y, h, lora_b, step, 0, add_inputs=add_inputs)


def groups(step: Step, max_loras: int) -> Iterator[tuple[int, Tensor]]:
    """(slot, int64 row numbers) of each group that has an adapter."""
    order, counts, starts, ids = step.groups
    for slot, start, count in zip(ids.tolist(), starts.tolist(), counts.tolist(), strict=False):
        if count and 0 <= slot < max_loras:
            yield slot, order[start : start + count].long()


def _matrix(weight: Tensor, slot: int) -> Tensor:
    return weight[slot].flatten(0, -2)
