"""A linear layer's product and its LoRA in one: in which order, and what runs beside what."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from kernels.launching.side_stream import SideStream
from kernels.metadata.launch_plan import MAX_SLICES
from kernels.vllm.dense.launches import add_delta, add_pair, product_with_pair
from kernels.vllm.dense.step import Step
from kernels.vllm.dense.tuning import product_config
from kernels.vllm.dense.work import MOST_SINGLE_ROWS

# between: shrink, a product of ours that runs beside it, and expand that adds to it. beside: LoRA by itself
#   on a second stream, beside the product, then their sum. before: LoRA first, then a product that adds to
#   it. behind: the product first, then LoRA that adds to it.
Form = Literal["between", "beside", "before", "behind"]

# Up to so many rows LoRA runs beside a product of cuBLAS. What it adds to Llama-3.1-8B's on one H200, with
# shrink alone beside them and with all of it: 21.1 and 17.8 us a layer at (8, 8), 34.4 and 26.6 at
# (64, 8), 55.9 and 55.8 at (64, 64).
_FEW_ROWS = 128


def best_form(x: Tensor, weight: Tensor, *, has_bias: bool, slices: int) -> Form:
    """Of a step with x [rows, inputs], and weight [columns, inputs].

    A small product waits for memory, so what runs beside it costs little, and a product that starts while
    shrink runs and leaves sums to expand costs less than cuBLAS's. A large one computes: it reads what
    it adds to for nothing, while to add to its result takes a pass over it. That is 760 us a layer in place
    of 1,050 at (16384, 8), 430 of 570 at (8192, 64), 137 of 188 at (2048, 8). The sum with a bias is left to
    the product, which rounds once.
    """
    rows = x.shape[0]
    if _is_for_ours(x, weight) and not has_bias and slices <= MAX_SLICES:
        return "between"
    if rows <= _FEW_ROWS:
        return "beside"
    return "before" if rows > MOST_SINGLE_ROWS and not has_bias else "behind"


def product_with_lora(
    y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor], step: Step, work: Tensor | None, form: Form,
) -> None:  # fmt: skip
    """y = x @ weight.T + bias, and what each row's adapter adds. Nothing is checked here. The slices of
    `lora_b` have all columns of y, but for `behind`."""
    if form == "between":
        config = product_config(x.shape[0], *weight.shape)
        assert config is not None
        product_with_pair(y, x, weight, lora_a, lora_b, step, work, config)
    elif form == "beside":
        delta = torch.empty_like(y)
        _side_stream(y.device).run_beside(
            lambda: _multiply(y, x, weight, bias),
            lambda: add_pair(delta, x, lora_a, lora_b, step, 1.0, add_inputs=False, work=work),
        )
        add_delta(y, delta, step, lora_b[0].shape[0])
    elif form == "before":
        add_pair(y, x, lora_a, lora_b, step, 1.0, add_inputs=False, fill=True)
        y.addmm_(x, weight.t())
    else:
        _multiply(y, x, weight, bias)
        add_pair(y, x, lora_a, lora_b, step, 1.0, add_inputs=True, work=work)


def _is_for_ours(x: Tensor, weight: Tensor) -> bool:
    """Rows that begin where 16 bytes may be loaded at once, of numbers that matrix instructions multiply."""
    fitting = all(
        t.element_size() == 2 and t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0
        for t in (x, weight)
    )
    return fitting and product_config(x.shape[0], *weight.shape) is not None


def _multiply(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.addmm(bias, x, weight.t(), out=y)


@lru_cache(maxsize=64)
def _side_stream(device: torch.device) -> SideStream:
    return SideStream(device)
