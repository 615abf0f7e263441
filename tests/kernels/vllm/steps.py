"""Random steps as vLLM describes them, and what the reference computes from one, by its own recipe."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mapping:
    """vLLM's LoRAMapping: adapter ids by row, and by row that reaches the head."""

    index_mapping: tuple[int, ...]
    prompt_mapping: tuple[int, ...]
    is_prefill: bool = False


@dataclass(frozen=True)
class Config:
    """What a wrapper reads of vLLM's LoRAConfig."""

    max_loras: int
    specialize_active_lora: bool = False
    max_lora_rank: int = 16


# Adapter ids by slot, as the model manager keeps them: one slot is empty, and no id is a slot.
SLOTS: list[int | None] = [700, 5, None, 31]
MAX_LORAS = len(SLOTS)


def slot_of(adapter: int) -> int:
    return SLOTS.index(adapter) if adapter > 0 else -1


def random_mapping(seed: int, most_rows: int) -> Mapping:
    draw = random.Random(seed)
    adapters = draw.sample([0, *(adapter for adapter in SLOTS if adapter)], draw.randint(1, 4))
    rows = [draw.choice(adapters) for _ in range(draw.randint(0, most_rows))]
    return Mapping(tuple(rows), tuple(rows[:: draw.randint(1, 3)]), draw.random() < 0.5)


def reference_meta(slots: Tensor, max_loras: int) -> dict[str, list[int]]:
    """The tensors of `LoRAKernelMeta` for a step's slots: sorted, counted and summed up on torch tensors.

    Of the two that are as long as the step, the step's part.
    """
    ids = torch.full((max_loras + 1,), -1)
    counts = torch.zeros(max_loras + 1, dtype=torch.long)
    starts = torch.zeros(max_loras + 2, dtype=torch.long)
    if not bool((slots == -1).all()):
        found, numbers = torch.unique(slots, sorted=True, return_counts=True)
        ids[: len(found)] = found
        counts[: len(found)] = numbers
        starts[1 : len(found) + 1] = numbers.cumsum(0)
    return {
        "token_lora_mapping": slots.tolist(),
        "token_indices_sorted_by_lora_ids": torch.sort(slots, stable=True).indices.tolist(),
        "active_lora_ids": ids.tolist(),
        "num_tokens_per_lora": counts.tolist(),
        "lora_token_start_loc": starts.tolist(),
    }
