"""Random stacked weights with NaN wherever nothing may be read, and the plain answer row by row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Triton's interpreter multiplies bfloat16 wrongly: that dtype is for the GPU.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@dataclass(frozen=True)
class Stack:
    """Per slice: A [slots, max_rank, in] and B [slots, max_rank, out_s], views of one NaN-filled arena."""

    arena: Tensor
    lora_a: list[Tensor]
    lora_b: list[Tensor]
    ranks: Tensor
    scales: Tensor
    column_starts: list[int]

    def to(self, device: str) -> "Stack":
        """The same on another device: still views of one arena with NaN where nothing may be read."""
        arena = self.arena.to(device)
        views = [
            [arena.as_strided(w.shape, w.stride(), w.storage_offset()) for w in weights]
            for weights in (self.lora_a, self.lora_b)
        ]
        return Stack(arena, *views, self.ranks.to(device), self.scales.to(device), self.column_starts)

    def delta(self, row: Tensor, slot: int, columns: int) -> Tensor:
        """float64 [columns]: what the slot adds to one row's output; slot -1 adds nothing."""
        y = torch.zeros(columns, dtype=torch.float64)
        for s, start in enumerate(self.column_starts if slot >= 0 else ()):
            rank = int(self.ranks[s, slot])
            a, b = self.lora_a[s][slot, :rank].double(), self.lora_b[s][slot, :rank].double()
            y[start : start + b.shape[1]] += self.scales[s, slot].double() * (a @ row.double()) @ b
        return y


def make_stack(
    ranks: Sequence[Sequence[int]],
    in_features: int,
    widths: Sequence[int],
    max_rank: int,
    dtype: torch.dtype = torch.float32,
) -> Stack:
    """ranks is [slices][slots]; column starts leave a gap of 3 columns before every slice."""
    slots = len(ranks[0])
    stripe = sum(max_rank * (in_features + width) for width in widths) + 5
    arena = torch.full((slots, stripe), torch.nan, dtype=dtype)
    lora_a, lora_b, starts, offset, column = [], [], [], 0, 0
    for slice_ranks, width in zip(ranks, widths, strict=True):
        a = arena.as_strided((slots, max_rank, in_features), (stripe, in_features, 1), offset)
        b = arena.as_strided((slots, max_rank, width), (stripe, width, 1), offset + max_rank * in_features)
        for slot, rank in enumerate(slice_ranks):
            a[slot, :rank] = (torch.randn(rank, in_features) / in_features**0.5).to(dtype)
            b[slot, :rank] = (torch.randn(rank, width) / max(rank, 1) ** 0.5).to(dtype)
        lora_a.append(a)
        lora_b.append(b)
        starts.append(column + 3)
        offset, column = offset + max_rank * (in_features + width), column + 3 + width
    scales = torch.rand(len(widths), slots) + 0.5
    return Stack(arena, lora_a, lora_b, torch.tensor(ranks, dtype=torch.int32), scales, starts)


def row_slots(runs: Sequence[tuple[int, int]]) -> list[int]:
    return [slot for slot, rows in runs for _ in range(rows)]


UNWRITTEN = 77.0  # not NaN: that is what reading beyond a rank would write


def unwritten_hidden(stack: Stack, rows: int) -> Tensor:
    return torch.full((len(stack.lora_a), rows, stack.lora_a[0].shape[1]), UNWRITTEN)
