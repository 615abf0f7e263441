"""What the slots hold: how many adapters, up to which rank, of which modules, in which dtype."""

from dataclasses import dataclass

import torch

from adapter_store.module_names import DENSE_PROJECTIONS
from executor.lora.quantize import FP8_DTYPES

SLOT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, *FP8_DTYPES)


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """What the slots hold: it fixes their number and size before the first adapter comes.

    `modules` are module kinds ("q_proj", "embed_tokens", "lm_head"); an adapter with another kind, or with
    more rank than `max_lora_rank`, is refused. `fully_sharded_loras` cuts, over the ranks of a
    tensor-parallel group, also the factor that each of them would hold whole. Raises ValueError naming the
    field.
    """

    max_loras: int
    max_lora_rank: int
    modules: frozenset[str] = frozenset(DENSE_PROJECTIONS)
    dtype: torch.dtype = torch.float32
    fully_sharded_loras: bool = False

    def __post_init__(self) -> None:
        if self.max_loras < 1:
            raise ValueError(f"max_loras must be at least 1, is {self.max_loras}")
        if self.max_lora_rank < 1:
            raise ValueError(f"max_lora_rank must be at least 1, is {self.max_lora_rank}")
        if not self.modules:
            raise ValueError("modules must name at least one module kind")
        if self.dtype not in SLOT_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, SLOT_DTYPES))}, is {self.dtype}")
        if self.dtype in FP8_DTYPES and self.fully_sharded_loras:
            # A rank's scale would be in what the others gather from it.
            raise ValueError("fully_sharded_loras must be false with FP8 slots")
