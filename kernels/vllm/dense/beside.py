"""Shrink on a second stream, beside the base product that reads the same x, in vLLM's compiled graphs.

vLLM's layers multiply, then call the wrapper: shrink would wait for a product that it does not need. So our
form of a layer's step marks when x is there, multiplies, and hands the mark to the wrapper, which launches
shrink behind the mark and expand behind both. The product is launched first: it takes its multiprocessors,
and the small launch what is left.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernels.vllm.operators import register

# Steps of up to so many rows, and from so many on: what shrink adds behind / beside the products of
# Llama-3.1-8B on one H200 is 34.0 / 22.6 us a layer at (64, 8), 58.5 / 52.6 at (64, 64), 97 / 102 at
# (256, 64), 177 / 185 at (2048, 8), 587 / 558 at (8192, 8).
_FEW_ROWS, _MANY_ROWS = 128, 8192

_KNOWN = """
def _apply_sync(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    output = self._get_quant_method().apply(self.base_layer, x, bias)
    return self._apply_lora_to_output(x, output)
"""


class Fork:
    """One device's second stream, and the event that says since when the last x is there."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        self._ready.record(torch.cuda.current_stream(self._stream.device))

    def run(self, launch: Callable[[], None]) -> None:
        """launch() behind the mark; what the current stream launches from here on waits for it.

        What it reads must not change before, and what it writes must be allocated before, so that it belongs
        to the current stream.
        """
        self._stream.wait_event(self._ready)
        with torch.cuda.stream(self._stream):
            launch()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@lru_cache(maxsize=64)
def fork_of(device: torch.device) -> Fork:
    return Fork(device)


def pays(rows: int) -> bool:
    """Whether shrink should run beside the product, in steps of so many rows."""
    return rows <= _FEW_ROWS or rows >= _MANY_ROWS


def _mark_input(x: Tensor) -> Tensor:
    """Say that x [rows, width] is there. What is returned keeps a compiler from moving the call behind the
    one that takes it."""
    if x.is_cuda and pays(x.shape[0]):
        fork_of(x.device).mark()
    return x.new_empty(1)


def _mark_shape(x: Tensor) -> Tensor:
    return x.new_empty(1)


mark_input = register("mark_input", _mark_input, mutates=(), fake=_mark_shape)


def put_beside(layer: Any) -> bool:
    """Let `layer`, vLLM's BaseLinearLayerWithLoRA, mark its input before it multiplies. Whether it does.

    It does not where a layer's step is another than the one that ours stands in for.
    """
    stock = layer._apply_sync
    if getattr(stock, "lorafleet", False):
        return True
    if _tree(inspect.getsource(stock)) != _tree(_KNOWN):
        return False

    def _apply_sync(self: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        finish = getattr(self.punica_wrapper, "finish_lora_linear", None)
        if x.ndim != 2 or finish is None:
            return stock(self, x, bias)  # type: ignore[no-any-return]
        mark = mark_input(x)
        output: Tensor = self._get_quant_method().apply(self.base_layer, x, bias)
        finish(output, x, self.lora_a_stacked, self.lora_b_stacked, 1.0, self.output_slices, mark)
        return output

    _apply_sync.lorafleet = True  # type: ignore[attr-defined]
    layer._apply_sync = _apply_sync
    return True


def _tree(source: str) -> str:
    return ast.dump(ast.parse(textwrap.dedent(source)))
