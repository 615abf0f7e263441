"""What each rank of an executor has: its share of the model, of the KV cache and of every slot."""

from dataclasses import dataclass
from pathlib import Path

import torch

from executor.attention import KVCache
from executor.config import ExecutorConfig
from executor.distributed import ParallelGroup
from executor.forward_pass import EagerForwardPass, ForwardPass
from executor.lora.arena import SlotArena
from executor.lora.config import LoRAConfig
from executor.lora.replace import attach_lora
from executor.models import CausalLM, load_model
from kernels.punica import PunicaWrapperBase, PunicaWrapperCPU


@dataclass(frozen=True, slots=True)
class Shard:
    model: CausalLM
    kv_cache: KVCache
    punica: PunicaWrapperBase
    arena: SlotArena
    forward_pass: ForwardPass


def build_shard(config: ExecutorConfig, group: ParallelGroup) -> Shard:
    """Raises UnsupportedModel, BadCheckpoint, LoRAError."""
    if config.torch_threads:
        torch.set_num_threads(config.torch_threads)
    dtype = getattr(torch, config.dtype)
    model = load_model(Path(config.model), dtype, config.device, group)
    punica = PunicaWrapperCPU(config.max_loras, config.max_batched_tokens, config.device)
    lora = LoRAConfig(
        config.max_loras,
        config.max_lora_rank,
        frozenset(config.lora_modules),
        dtype,
        config.fully_sharded_loras,
    )
    arena = attach_lora(model, lora, punica).arena
    kv_cache = KVCache.allocate(
        config.num_kv_blocks, config.block_size, model.config, dtype, config.device, group
    )
    return Shard(model, kv_cache, punica, arena, EagerForwardPass(model, kv_cache, punica))
