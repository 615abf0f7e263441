"""Random expert weights with NaN wherever nothing may be read, and the plain answer pair by pair."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertStack:
    """Per slice: A [slots, experts, max_rank, in] and B [slots, experts, max_rank, out_s], views of one
    NaN-filled arena; ranks and scales are [slices, slots, experts]."""

    arena: Tensor
    lora_a: list[Tensor]
    lora_b: list[Tensor]
    ranks: Tensor
    scales: Tensor
    column_starts: list[int]

    def to(self, device: str, dtype: torch.dtype | None = None) -> "ExpertStack":
        arena = self.arena.to(device, dtype)
        views = [
            [arena.as_strided(w.shape, w.stride(), w.storage_offset()) for w in weights]
            for weights in (self.lora_a, self.lora_b)
        ]
        return ExpertStack(arena, *views, self.ranks.to(device), self.scales.to(device), self.column_starts)

    @property
    def columns(self) -> int:
        return self.column_starts[-1] + self.lora_b[-1].shape[3] + 2

    def delta(self, row: Tensor, slot: int, expert: int) -> Tensor:
        """float64 [columns]: what the slot adds to the output of one pair; no slot or expert adds nothing."""
        y = torch.zeros(self.columns, dtype=torch.float64)
        for s, start in enumerate(self.column_starts if slot >= 0 and expert >= 0 else ()):
            rank = int(self.ranks[s, slot, expert])
            a, b = self.lora_a[s][slot, expert, :rank].double(), self.lora_b[s][slot, expert, :rank].double()
            y[start : start + b.shape[1]] += self.scales[s, slot, expert].double() * (a @ row.double()) @ b
        return y


def make_expert_stack(
    ranks: Tensor, in_features: int, widths: Sequence[int], max_rank: int, dtype: torch.dtype = torch.float32
) -> ExpertStack:
    """ranks is int32 [slices, slots, experts]; column starts leave a gap of 3 columns before every slice."""
    _, slots, experts = ranks.shape
    stripe = sum(experts * max_rank * (in_features + width) for width in widths) + 16
    arena = torch.full((slots, stripe), torch.nan, dtype=dtype)
    views, offset = [], 0
    for size in (size for width in widths for size in (in_features, width)):
        shape = (slots, experts, max_rank, size)
        views.append(arena.as_strided(shape, (stripe, max_rank * size, size, 1), offset))
        offset += experts * max_rank * size
    lora_a, lora_b, starts = views[0::2], views[1::2], []
    for s, width in enumerate(widths):
        starts.append(sum(widths[:s]) + 3 * (s + 1))
        for slot in range(slots):
            for expert in range(experts):
                rank = int(ranks[s, slot, expert])
                a, b = torch.randn(rank, in_features), torch.randn(rank, width)
                lora_a[s][slot, expert, :rank] = (a / in_features**0.5).to(dtype)
                lora_b[s][slot, expert, :rank] = (b / max(rank, 1) ** 0.5).to(dtype)
    return ExpertStack(arena, lora_a, lora_b, ranks, torch.rand(ranks.shape) + 0.5, starts)


def random_choices(rows: int, topk: int, experts: int) -> Tensor:
    """int32 [rows, topk], distinct within a row."""
    return torch.rand(rows, experts).topk(topk, dim=1).indices.to(torch.int32)
