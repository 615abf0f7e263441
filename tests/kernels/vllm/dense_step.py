"""A step of vLLM's dense LoRA operations with random weights, and its answer row by row in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.vllm.dense.step import Step
from kernels.vllm.dense.work import WORK, write_work
from kernels.vllm.kernel_meta import group_tokens


@dataclass(frozen=True)
class Layer:
    """slots: those of the rows, drawn from; `beyond`: rows of an earlier, longer step in the buffers."""

    rows: int
    slots: Sequence[int] = (-1, 0, 2)
    max_loras: int = 4
    rank: int = 6
    width: int = 40
    outs: tuple[int, ...] = (21,)
    offset: int = 0
    beyond: int = 0
    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def mapping(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        slots = torch.tensor(self.slots, dtype=torch.int32)
        if self.rows <= len(slots):
            return slots[torch.randperm(len(slots), generator=generator)[: self.rows]]
        return slots[torch.randint(len(slots), (self.rows,), generator=generator)]

    def step(self) -> Step:
        return describe(self.mapping(), self.max_loras, self.rows + self.beyond).to(self.device)

    def work(self) -> Tensor:
        """What `kernels.vllm.dense.work` says of the step."""
        groups = group_tokens(self.mapping().numpy(), self.max_loras, self.rows)
        work = np.full(WORK.shape, 99, dtype=np.int32)
        write_work(work, groups, self.rank)
        return torch.from_numpy(work).to(self.device)

    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        return (
            [self._random(self.max_loras, 1, self.rank, self.width) for _ in self.outs],
            [self._random(self.max_loras, 1, out, self.rank) for out in self.outs],
        )

    def inputs(self) -> tuple[Tensor, Tensor]:
        """x and y."""
        rows = self.rows + self.beyond
        return self._random(rows, self.width), self._random(rows, self.offset + sum(self.outs) + 3)

    def _random(self, *shape: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(self.seed + sum(shape))
        scale = shape[-1] ** -0.5
        values = torch.randn(*shape, generator=generator, device=self.device, dtype=torch.float32)
        return (values * scale).to(self.dtype)


def slots_of(rows: int, first: int, number: int) -> Sequence[int]:
    """Slots for a step that is captured: one without any adapter would be left out of the graph."""
    some = range(first, first + number)
    return some if rows == 1 else (-1, *some)


@dataclass(frozen=True)
class Described:
    tensors: tuple[Tensor, ...]
    flags: tuple[Tensor, Tensor]

    def to(self, device: str) -> Step:
        return Step(*(tensor.to(device) for tensor in self.tensors), *self.flags)


def describe(mapping: Tensor, max_loras: int, length: int) -> Described:
    """By the reference's recipe, in buffers whose rest is an earlier step's: every row there has slot 0."""
    rows = len(mapping)
    slots, order = torch.zeros(length, dtype=torch.int32), torch.arange(length).flip(0).to(torch.int32)
    ids = torch.full((max_loras + 1,), -1, dtype=torch.int32)
    counts = torch.zeros(max_loras + 1, dtype=torch.int32)
    starts = torch.zeros(max_loras + 2, dtype=torch.int32)
    found, numbers = torch.unique(mapping, sorted=True, return_counts=True)
    slots[:rows], order[:rows] = mapping, torch.sort(mapping, stable=True).indices.to(torch.int32)
    ids[: len(found)], counts[: len(found)] = found, numbers.to(torch.int32)
    starts[1 : len(found) + 1] = numbers.cumsum(0)
    idle = bool((mapping == -1).all())
    flags = torch.tensor([idle]), torch.tensor([max_loras + 1], dtype=torch.int32)
    return Described((slots, order, counts, starts, ids), flags)


def shrunk(layer: Layer, x: Tensor, a: list[Tensor], scale: float) -> Tensor:
    """float64 [slices, rows, rank], zeros for rows without an adapter."""
    h = torch.zeros(len(a), len(x), layer.rank, dtype=torch.float64, device=x.device)
    for row, slot in enumerate(layer.mapping().tolist()):
        if slot >= 0:
            for s, weight in enumerate(a):
                h[s, row] = weight[slot, 0].double() @ x[row].double() * scale
    return h


def expanded(layer: Layer, y: Tensor, h: Tensor, b: list[Tensor], add_inputs: bool) -> Tensor:
    """float64, as y."""
    result = y.double()
    for row, slot in enumerate(layer.mapping().tolist()):
        start = layer.offset
        for s, weight in enumerate(b):
            columns = slice(start, start := start + weight.shape[-2])
            if slot >= 0:
                delta = weight[slot, 0].double() @ h[s, row].double()
                result[row, columns] = result[row, columns] + delta if add_inputs else delta
    return result
