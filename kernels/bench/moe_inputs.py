"""Inputs: expert layers of Mixtral-8x7B and Qwen3-30B-A3B, with per-expert LoRA and random routing."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.bench.inputs import copy_rate
from kernels.metadata.meta import LoRAKernelMeta
from kernels.metadata.work_list import Run

MAX_LORAS, RANK = 8, 16
TOKENS = (1, 8, 64, 512, 2048)
POINTS = tuple((tokens, adapters) for tokens in TOKENS for adapters in (1, 8) if adapters <= tokens)


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    experts: int
    topk: int
    hidden: int
    inner: int


Points = tuple[tuple[Shape, tuple[tuple[int, int], ...]], ...]
SHAPES = (Shape("mixtral", 8, 2, 4096, 14336), Shape("qwen3-30b-a3b", 128, 8, 2048, 768))


def selected(shapes: Sequence[str] | None, tokens: Sequence[int] | None) -> Points:
    """Shapes of these names with their (tokens, adapters) of these tokens; None: all."""
    points = tuple(point for point in POINTS if tokens is None or point[0] in tokens)
    return tuple((shape, points) for shape in SHAPES if shapes is None or shape.name in shapes)


@dataclass(frozen=True, slots=True)
class Product:
    """One product's LoRA: every slot full, A and B of all slices as views of one arena."""

    lora_a: list[Tensor]
    lora_b: list[Tensor]
    ranks: Tensor
    scales: Tensor
    column_starts: list[int]

    @classmethod
    def random(cls, shape: Shape, width: int, columns: int, slices: int) -> "Product":
        sizes = [shape.experts * RANK * size for _ in range(slices) for size in (width, columns)]
        arena = torch.randn(MAX_LORAS, sum(sizes), device="cuda", dtype=torch.bfloat16) * 0.02
        views, offset = [], 0
        for size in sizes:
            row = size // (shape.experts * RANK)
            strides = (sum(sizes), RANK * row, row, 1)
            views.append(arena.as_strided((MAX_LORAS, shape.experts, RANK, row), strides, offset))
            offset += size
        ranks = torch.full((slices, MAX_LORAS, shape.experts), RANK, dtype=torch.int32, device="cuda")
        starts = [s * columns for s in range(slices)]
        return cls(views[0::2], views[1::2], ranks, torch.ones_like(ranks, dtype=torch.float32), starts)


@dataclass(frozen=True, slots=True)
class Layer:
    shape: Shape
    w13: Product
    w2: Product

    @classmethod
    def random(cls, shape: Shape) -> "Layer":
        first = Product.random(shape, shape.hidden, shape.inner, 2)
        return cls(shape, first, Product.random(shape, shape.inner, shape.hidden, 1))


@dataclass(frozen=True, slots=True)
class Case:
    """Rotating inputs of one (layer, tokens, adapters): call i takes routing i and the slots of step i."""

    layer: Layer
    tokens: int
    adapters: int
    runs: list[list[Run]]
    metas: list[LoRAKernelMeta]
    choices: list[Tensor]
    weights: list[Tensor]
    x: Tensor
    inner: Tensor
    y13: Tensor
    y2: Tensor

    @property
    def calls(self) -> int:
        """Walks over all routings and slots."""
        return max(len(self.choices), len(self.metas))


def make_case(layer: Layer, tokens: int, adapters: int) -> Case:
    shape, generator = layer.shape, torch.Generator().manual_seed(2)
    routings = {1: 16, 8: 16, 64: 8, 512: 8, 2048: 4}[tokens]
    choices, weights = [], []
    for _ in range(routings):
        best = torch.softmax(torch.randn(tokens, shape.experts, generator=generator), -1).topk(shape.topk)
        choices.append(best.indices.to(torch.int32).to("cuda"))
        weights.append((best.values / best.values.sum(-1, keepdim=True)).to("cuda"))
    runs = [_runs(tokens, adapters, rotation) for rotation in range(MAX_LORAS // adapters)]
    pairs = tokens * shape.topk
    return Case(
        layer,
        tokens,
        adapters,
        runs,
        [_meta(tokens, step) for step in runs],
        choices,
        weights,
        _rows(tokens, shape.hidden),
        _rows(pairs, shape.inner),
        _rows(pairs, 2 * shape.inner),
        _rows(pairs, shape.hidden),
    )


def _runs(tokens: int, adapters: int, rotation: int) -> list[Run]:
    """Shuffled one by one up to 128 tokens (decode), in blocks above (prefill)."""
    slots = [(rotation * adapters + index) % MAX_LORAS for index in range(adapters)]
    if tokens > 128:
        return [(slot, tokens // adapters) for slot in slots]
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(rotation)).tolist()
    return [(slots[index % adapters], 1) for index in order]


def _meta(tokens: int, runs: list[Run]) -> LoRAKernelMeta:
    meta = LoRAKernelMeta.make(MAX_LORAS, tokens, "cuda")
    meta.prepare_tensors(runs)
    return meta


def _rows(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)


def floor_us(case: Case) -> float:
    """Least bytes at the card's copy rate, mean over the routings: A and B of the distinct (adapter, expert)
    pairs, x and inner read, y13 and y2 read and written, h written and read."""
    shape, pairs = case.layer.shape, case.tokens * case.layer.shape.topk
    groups = 0.0
    for index in range(case.calls):
        slots = [slot for slot, rows in case.runs[index % len(case.runs)] for _ in range(rows)]
        chosen = case.choices[index % len(case.choices)].tolist()
        groups += len({(slot, e) for slot, row in zip(slots, chosen, strict=True) for e in row}) / case.calls
    weights = groups * 2 * RANK * 3 * (shape.hidden + shape.inner)
    rows = 2 * case.tokens * shape.hidden + 2 * pairs * shape.inner
    rows += 2 * 2 * pairs * (2 * shape.inner + shape.hidden) + 2 * 4 * pairs * 3 * RANK
    return (weights + rows) / copy_rate() * 1e6
