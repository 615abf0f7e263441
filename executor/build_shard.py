"""Builds one rank's shard, its share of model, cache and slots, on whichever device is configured."""

from pathlib import Path

import torch

from executor.config import ExecutorConfig
from executor.distributed import ParallelGroup
from executor.layers.attention import KVCache
from executor.models import load_model
from executor.step.forward_pass import EagerForwardPass
from executor.step.shard import Shard, attach_slots, dtype_of
from kernels.punica import PunicaWrapperCPU

# Without --num-kv-blocks, on the CPU.
_CPU_BLOCKS = 1024


def build_shard(config: ExecutorConfig, group: ParallelGroup) -> Shard:
    """Ready to run steps: everything is compiled. Raises InvalidModel, UnsupportedModel, BadCheckpoint,
    LoRAError, and StartError when the device is not there or too small."""
    if config.torch_threads:
        torch.set_num_threads(config.torch_threads)
    if config.device != "cpu":
        from executor.gpu.build import build_gpu_shard  # needs triton

        return build_gpu_shard(config, group)
    dtype = dtype_of(config)
    model = load_model(
        Path(config.model), dtype, "cpu", group,
        dummy=config.load_format == "dummy", expert_parallel=config.expert_parallel,
    )  # fmt: skip
    punica = PunicaWrapperCPU(config.max_loras, config.step_tokens, "cpu")
    slots = attach_slots(config, model, punica)
    blocks = config.num_kv_blocks or _CPU_BLOCKS
    kv_cache = KVCache.allocate(blocks, config.block_size, model.config, dtype, "cpu", group)
    return Shard(model, kv_cache, punica, slots, EagerForwardPass(model, kv_cache, punica))
