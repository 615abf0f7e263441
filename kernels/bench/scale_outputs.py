"""DoRA's factors on a layer's output: what a launch adds to a step, by how many rows have some."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.bench.inputs import LAYERS, MAX_LORAS, Layer, copy_rate
from kernels.bench.timing import time_calls
from kernels.metadata.meta import LoRAKernelMeta
from kernels.scale_outputs import scale_outputs

TOKENS = (1, 64, 512, 8192)
CALLS = 8


@dataclass(frozen=True, slots=True)
class Row:
    """`scaled`: rows whose slot has factors. floor_us: their y read and written, and a factor read for each
    column and slot of theirs, at the card's copy rate."""

    op: str
    layer: str
    tokens: int
    scaled: int
    us: float
    floor_us: float


@dataclass(frozen=True, slots=True)
class _Case:
    """Rows take turns over all slots; the first `marked` slots have factors."""

    layer: Layer
    tokens: int
    marked: int

    @property
    def scaled(self) -> int:
        return sum(row % MAX_LORAS < self.marked for row in range(self.tokens))

    @property
    def floor_us(self) -> float:
        factors = 4 * min(self.marked, self.tokens) * self.layer.columns
        return (4 * self.scaled * self.layer.columns + factors) / copy_rate() * 1e6


def run() -> Iterator[dict[str, object]]:
    for layer in LAYERS:
        for tokens in TOKENS:
            cases = [_Case(layer, tokens, marked) for marked in (0, 1, MAX_LORAS)]
            times = time_calls([(_call(case), CALLS) for case in cases])
            for case, us in zip(cases, times, strict=True):
                yield asdict(Row("scale_outputs", layer.name, tokens, case.scaled, us, case.floor_us))


def _call(case: _Case) -> partial[None]:
    meta = LoRAKernelMeta.make(MAX_LORAS, case.tokens, "cuda")
    meta.prepare_tensors([(row % MAX_LORAS, 1) for row in range(case.tokens)])
    marks = torch.full((MAX_LORAS + 1,), -1, dtype=torch.int32, device="cuda")
    marks[: case.marked] = 0
    y = torch.randn(case.tokens, case.layer.columns, device="cuda", dtype=torch.bfloat16)
    factors = torch.ones(CALLS, MAX_LORAS, case.layer.columns, device="cuda")
    return partial(_scale, y, factors, marks, meta)


def _scale(y: Tensor, factors: Tensor, marks: Tensor, meta: LoRAKernelMeta, index: int) -> None:
    """Factors of another layer in each call: in a model they come from memory, y from the cache."""
    scale_outputs(y, factors[index], marks, None, meta)
