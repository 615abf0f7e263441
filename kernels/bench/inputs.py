"""Inputs of the dense LoRA layers of Llama-3.1-8B, in bfloat16, with the bytes that they must move."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.metadata.meta import LoRAKernelMeta
from kernels.metadata.work_list import Run

MAX_LORAS = 64
# Bytes a second that a large copy reaches on the card (read plus write).
COPY_RATE = {"H100": 3.0e12, "H200": 4.0e12}
# Distinct bytes that a graph walks over, so that the 50 MB second-level cache holds little of them.
ROTATED_BYTES = 120e6


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer of packed slices over one input."""

    name: str
    width: int
    slices: tuple[int, ...]

    @property
    def columns(self) -> int:
        return sum(self.slices)


LAYERS = (
    Layer("qkv", 4096, (4096, 1024, 1024)),
    Layer("o", 4096, (4096,)),
    Layer("gate_up", 4096, (14336, 14336)),
    Layer("down", 14336, (4096,)),
)


@dataclass(frozen=True, slots=True)
class WeightSet:
    """Every slot full: A and B of each slice as views of one arena, as the executor has them."""

    lora_a: list[Tensor]
    lora_b: list[Tensor]

    @classmethod
    def random(cls, layer: Layer, max_rank: int) -> "WeightSet":
        sizes = [max_rank * width for out in layer.slices for width in (layer.width, out)]
        arena = torch.randn(MAX_LORAS, sum(sizes), device="cuda", dtype=torch.bfloat16) * 0.02
        views, offset = [], 0
        for size in sizes:
            shape = (MAX_LORAS, max_rank, size // max_rank)
            views.append(arena.as_strided(shape, (sum(sizes), size // max_rank, 1), offset))
            offset += size
        return cls(views[0::2], views[1::2])


@dataclass(frozen=True, slots=True)
class Case:
    """Rotating inputs of one (layer, tokens, adapters, rank)."""

    layer: Layer
    tokens: int
    adapters: int
    ranks: Tensor
    scales: Tensor
    metas: list[LoRAKernelMeta]
    weights: list[WeightSet]
    xs: list[Tensor]
    ys: list[Tensor]
    bases: list[Tensor]

    @property
    def column_starts(self) -> list[int]:
        return [sum(self.layer.slices[:index]) for index in range(len(self.layer.slices))]


def runs(tokens: int, adapters: int, rotation: int) -> list[Run]:
    """The adapters' rows: interleaved one by one up to 128 tokens (decode), in blocks above (prefill)."""
    slots = [(rotation * adapters + index) % MAX_LORAS for index in range(adapters)]
    if tokens > 128:
        return [(slot, tokens // adapters) for slot in slots]
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(rotation)).tolist()
    return [(slots[index % adapters], 1) for index in order]


def make_metas(tokens: int, adapters: int, slot_ranks: list[int]) -> list[LoRAKernelMeta]:
    metas = []
    for rotation in range(MAX_LORAS // adapters):
        meta = LoRAKernelMeta.make(MAX_LORAS, tokens, "cuda")
        meta.slot_ranks[:] = slot_ranks
        meta.prepare_tensors(runs(tokens, adapters, rotation))
        metas.append(meta)
    return metas


def weight_sets(layer: Layer, max_rank: int) -> list[WeightSet]:
    set_bytes = MAX_LORAS * 2 * max_rank * (layer.width * len(layer.slices) + layer.columns)
    count = min(10, max(2, math.ceil(ROTATED_BYTES / set_bytes)))
    return [WeightSet.random(layer, max_rank) for _ in range(count)]


def base_weights(layer: Layer) -> list[Tensor]:
    count = max(2, math.ceil(160e6 / (layer.columns * layer.width * 2)))
    shape = (layer.columns, layer.width)
    return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]


def make_case(
    layer: Layer,
    tokens: int,
    adapters: int,
    slot_ranks: list[int],
    weights: list[WeightSet],
    bases: list[Tensor],
) -> Case:
    copies = 4 if tokens <= 2048 else 1
    slices = len(layer.slices)
    return Case(
        layer,
        tokens,
        adapters,
        torch.tensor([slot_ranks] * slices, dtype=torch.int32, device="cuda"),
        torch.full((slices, MAX_LORAS), 0.5, device="cuda"),
        make_metas(tokens, adapters, slot_ranks),
        weights,
        [_rows(tokens, layer.width) for _ in range(copies)],
        [_rows(tokens, layer.columns) for _ in range(copies)],
        bases,
    )


def _rows(tokens: int, width: int) -> Tensor:
    return torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16) * 0.5


def floor_us(layer: Layer, tokens: int, adapters: int, rank: int) -> float:
    """Least bytes at the card's copy rate: active A and B, x read, y read and written, h written and read."""
    slices = len(layer.slices)
    weights = adapters * 2 * rank * (layer.width * slices + layer.columns)
    rows = 2 * tokens * layer.width + 2 * 2 * tokens * layer.columns + 2 * 4 * tokens * rank * slices
    return (weights + rows) / copy_rate() * 1e6


def lora_flops(layer: Layer, tokens: int, rank: int) -> int:
    """Multiplications and additions of shrink and expand."""
    return 2 * tokens * rank * (layer.width * len(layer.slices) + layer.columns)


def copy_rate() -> float:
    name = torch.cuda.get_device_name()
    return next((rate for card, rate in COPY_RATE.items() if card in name), COPY_RATE["H100"])
