"""The dense operations with FP8 weights in plain torch: the truth of the kernels, and for CPU tensors."""

from collections.abc import Sequence

from torch import Tensor

from kernels.vllm.dense.reference import groups
from kernels.vllm.dense.step import Step
from kernels.vllm.scaling import Scaling


def shrink(
    output: Tensor, x: Tensor, lora_a: Sequence[Tensor], step: Step, scale: float, of: Scaling
) -> None:
    """The contract is that of kernels/vllm/lora_shrink_fp8.py; lora_a is [max_loras, 1, rank, in]."""
    output.zero_()
    for slot, rows in groups(step, lora_a[0].shape[0]):
        taken = of.row(x, rows)
        for s in range(len(lora_a)):
            product = taken @ of.weight(lora_a, s, slot, 0).T
            output[s, rows] = (product * scale).to(output.dtype)


def expand(
    output: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    step: Step,
    offset: int,
    of: Scaling,
    *,
    add_inputs: bool,
) -> None:
    """The contract is that of kernels/vllm/lora_expand_fp8.py; lora_b is [max_loras, 1, out_s, rank]."""
    for slot, rows in groups(step, lora_b[0].shape[0]):
        start = offset
        for s, weight in enumerate(lora_b):
            columns = slice(start, start := start + weight.shape[-2])
            delta = of.row(h[s], rows) @ of.weight(lora_b, s, slot, 0).T
            if add_inputs:
                delta += output[rows, columns].float()
            output[rows, columns] = delta.to(output.dtype)
