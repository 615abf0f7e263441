"""A linear layer's product and its LoRA in one: in which order, and what runs beside what."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from kernels.vllm.dense.launches import add_delta, add_pair
from kernels.vllm.dense.step import Step
from kernels.vllm.dense.work import MOST_SINGLE_ROWS

# beside: LoRA by itself on a second stream, beside the product, then their sum. before: LoRA first, then a
#   product that adds to it. behind: the product first, then LoRA that adds to it.
Form = Literal["beside", "before", "behind"]

# Up to so many rows LoRA runs beside the product. What it adds to the products of Llama-3.1-8B on one H200,
# with shrink alone beside them and with all of it: 21.1 and 17.8 us a layer at (8, 8), 34.4 and 26.6 at
# (64, 8), 55.9 and 55.8 at (64, 64).
_FEW_ROWS = 128


def best_form(rows: int, *, has_bias: bool) -> Form:
    """Of a step of so many rows.

    A small product waits for memory, so what runs beside it costs little. A large one computes: it reads what
    it adds to for nothing, while to add to its result takes a pass over it. That is 760 us a layer in place
    of 1,050 at (16384, 8), 430 of 570 at (8192, 64), 137 of 188 at (2048, 8). The sum with a bias is left to
    the product, which rounds once.
    """
    if rows <= _FEW_ROWS:
        return "beside"
    return "before" if rows > MOST_SINGLE_ROWS and not has_bias else "behind"


def product_with_lora(
    y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor], step: Step, work: Tensor | None, form: Form,
) -> None:  # fmt: skip
    """y = x @ weight.T + bias, and what each row's adapter adds. Nothing is checked here. The slices of
    `lora_b` have all columns of y, but for `behind`."""
    if form == "beside":
        delta = torch.empty_like(y)
        fork = _fork_of(y.device)
        fork.mark()
        _multiply(y, x, weight, bias)
        fork.run(lambda: add_pair(delta, x, lora_a, lora_b, step, 1.0, add_inputs=False, work=work))
        add_delta(y, delta, step, lora_b[0].shape[0])
    elif form == "before":
        add_pair(y, x, lora_a, lora_b, step, 1.0, add_inputs=False, fill=True)
        y.addmm_(x, weight.t())
    else:
        _multiply(y, x, weight, bias)
        add_pair(y, x, lora_a, lora_b, step, 1.0, add_inputs=True, work=work)


def _multiply(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.addmm(bias, x, weight.t(), out=y)


class _Fork:
    """One device's second stream, and the event that says since when the last x is there."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        self._ready.record(torch.cuda.current_stream(self._stream.device))

    def run(self, launch: Callable[[], None]) -> None:
        """launch() behind the mark; what the current stream launches from here on waits for it.

        What it reads must not change before, and what it leaves must be allocated before, so that it belongs
        to the current stream.
        """
        self._stream.wait_event(self._ready)
        with torch.cuda.stream(self._stream):
            launch()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@lru_cache(maxsize=64)
def _fork_of(device: torch.device) -> _Fork:
    return _Fork(device)
