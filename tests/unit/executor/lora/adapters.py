"""Random loud adapters for a slot layout, as the adapter store hands them out."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from adapter_store import LoRAModule
from executor.lora.arena import SlotArena
from executor.lora.layout import SlotLayout


def make_adapter(
    layout: SlotLayout, ranks: Mapping[str, int], seed: int, dtype: Any = np.float32, scale: float = 0.75
) -> dict[str, LoRAModule]:
    """One module for each name in `ranks`; read-only arrays, as mapped files are."""
    random = np.random.default_rng(seed)
    modules = {}
    for name, rank in ranks.items():
        part = layout.slices[layout.index[name]]
        stack = (part.num_experts, rank) if part.num_experts else (rank,)
        a = (random.standard_normal((*stack, part.in_features)) / part.in_features**0.5).astype(dtype)
        b = (random.standard_normal((*stack, part.out_features)) / rank**0.5).astype(dtype)
        a.flags.writeable = b.flags.writeable = False
        modules[name] = LoRAModule(name, rank, scale, a, b)
    return modules


def poison(arena: SlotArena, slot: int) -> None:
    """NaN over the whole stripe: whatever is read beyond an adapter's own rank shows."""
    arena.storage[slot] = torch.nan
