"""What each rank of an executor has: its share of the model, of the KV cache and of every slot."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from adapter_store.base.config import BaseConfig
from executor.config import MODULE_KINDS, ExecutorConfig
from executor.errors import StartError
from executor.layers.attention import KVCache
from executor.lora.arena import SlotArena
from executor.lora.config import LoRAConfig
from executor.lora.dora import DoRAFactors
from executor.lora.full_heads import FullHeads
from executor.lora.replace import attach_lora
from executor.lora.slot_marks import SlotMarks
from executor.models import CausalLM
from executor.step.forward_pass import ForwardPass
from kernels.errors import KernelArgumentError
from kernels.launching.fp8 import check_capability
from kernels.punica import PunicaWrapperBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Slots:
    """What holds adapters on the device. `dora`: on one rank only."""

    arena: SlotArena
    dora: DoRAFactors | None = None
    full_heads: FullHeads | None = None

    @property
    def marks(self) -> tuple[SlotMarks, ...]:
        """Of slots whose adapters are more than low-rank pairs in what a step does before the head."""
        dora = (self.dora.marks,) if self.dora else ()
        return (*dora, self.full_heads.tables) if self.full_heads else dora


@dataclass(frozen=True, slots=True)
class Shard:
    model: CausalLM
    kv_cache: KVCache
    punica: PunicaWrapperBase
    slots: Slots
    forward_pass: ForwardPass

    @property
    def arena(self) -> SlotArena:
        return self.slots.arena


def dtype_of(config: ExecutorConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.model_dtype)
    return dtype


def lora_dtype_of(config: ExecutorConfig) -> torch.dtype:
    fp8 = {"fp8": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}
    return fp8.get(config.lora_dtype, dtype_of(config))


def with_fused_modules(config: ExecutorConfig) -> ExecutorConfig:
    """The settings with a projection that the model's checkpoint fuses in place of its parts, where those are
    all named. Raises InvalidModel."""
    kinds = set(config.lora_modules)
    for fused, parts in BaseConfig.from_folder(Path(config.model)).own_projections.items():
        if kinds.issuperset(parts):
            kinds = kinds.difference(parts) | {fused}
    return replace(config, lora_modules=tuple(kind for kind in MODULE_KINDS if kind in kinds))


def lora_config_of(config: ExecutorConfig) -> LoRAConfig:
    return LoRAConfig(
        config.max_loras,
        config.max_lora_rank,
        frozenset(config.lora_modules),
        lora_dtype_of(config),
        config.fully_sharded_loras,
    )


def check_lora_dtype(config: ExecutorConfig, capability: tuple[int, int]) -> None:
    """Raises StartError where the card cannot convert the slots' type: before weights are loaded."""
    try:
        check_capability(lora_dtype_of(config), capability, "--lora-dtype")
    except KernelArgumentError as error:
        raise StartError(
            f"--lora-dtype {config.lora_dtype} needs a card of sm_89 or later; {error}"
        ) from error


def attach_slots(config: ExecutorConfig, model: CausalLM, punica: PunicaWrapperBase) -> Slots:
    """Raises LoRAError."""
    arena = attach_lora(model, lora_config_of(config), punica).arena
    logger.info(
        "%d slots of rank %d take %.1f MB each, %.2f GB in all",
        config.max_loras,
        config.max_lora_rank,
        arena.nbytes_per_slot / 1e6,
        arena.nbytes_per_slot * config.max_loras / 1e9,
    )
    dora = DoRAFactors(model, config.max_loras, _factor_folder(config)) if model.group.size == 1 else None
    full_heads = FullHeads(model, config.max_full_heads, punica) if config.max_full_heads else None
    if full_heads:
        logger.info("%d full heads take %.2f GB each", full_heads.number, full_heads.nbytes / 1e9)
    return Slots(arena, dora, full_heads)


def _factor_folder(config: ExecutorConfig) -> Path | None:
    return Path(config.cache_dir) / "factors" if config.cache_dir else None
