"""One engine from a configuration: the only place that knows how its parts are put together."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from adapter_store import AdapterStore, ModelSpec
from executor.attention import KVCache
from executor.batcher import Batcher
from executor.blocks import BlockPool
from executor.config import ExecutorConfig
from executor.engine import Engine
from executor.errors import StartError
from executor.events import EngineInfo
from executor.lora.arena import SlotArena
from executor.lora.config import LoRAConfig
from executor.lora.image import SlotImage, build_slot_image
from executor.lora.replace import attach_lora
from executor.metrics import Metrics
from executor.model_runner import ModelRunner
from executor.models import CausalLM, load_model
from executor.paging import Pager
from executor.sequence import StopLimits
from executor.slots import SlotTable
from kernels.punica import PunicaWrapperBase, PunicaWrapperCPU

logger = logging.getLogger(__name__)


def build_engine(
    config: ExecutorConfig,
    store: AdapterStore,
    *,
    metrics: Metrics | None = None,
    wake: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """Load the model and everything around it. `wake` is called on other threads when `step` has news to see.

    Raises InvalidModel, UnsupportedModel, BadCheckpoint, LoRAError, StartError.
    """
    if config.torch_threads:
        torch.set_num_threads(config.torch_threads)
    metrics = metrics or Metrics(CollectorRegistry())
    path, dtype = Path(config.model), getattr(torch, config.dtype)
    spec = ModelSpec.from_folder(path)
    model = load_model(path, dtype, config.device)
    punica = PunicaWrapperCPU(config.max_loras, config.max_batched_tokens, config.device)
    arena = _attach(model, config, dtype, punica)
    kv_cache = KVCache.allocate(config.num_kv_blocks, config.block_size, model.config, dtype, config.device)
    limits = StopLimits(frozenset(model.config.eos_token_ids), _max_model_len(config, spec))
    slots = SlotTable(config.max_loras)
    batcher = Batcher(
        BlockPool(config.num_kv_blocks, config.block_size, prefix_cache=config.prefix_cache),
        slots,
        max_batched_tokens=config.max_batched_tokens,
        max_seats=config.max_seats,
        aging_s=config.adapter_aging,
    )
    info = _info(config, spec, limits)
    logger.info("model %s is loaded: %s", spec.name, info)
    return Engine(
        info=info,
        runner=ModelRunner(model, kv_cache, punica, limits),
        batcher=batcher,
        pager=_pager(config, store, arena, slots, metrics, wake),
        limits=limits,
        vocab_size=spec.vocab_size,
        metrics=metrics,
        clock=clock,
    )


def _attach(
    model: CausalLM, config: ExecutorConfig, dtype: torch.dtype, punica: PunicaWrapperBase
) -> SlotArena:
    lora = LoRAConfig(config.max_loras, config.max_lora_rank, frozenset(config.lora_modules), dtype)
    return attach_lora(model, lora, punica)


def _pager(
    config: ExecutorConfig,
    store: AdapterStore,
    arena: SlotArena,
    slots: SlotTable,
    metrics: Metrics,
    wake: Callable[[], None],
) -> Pager[SlotImage]:
    if config.host_memory_bytes < arena.nbytes_per_slot:
        raise StartError(
            f"--host-memory-bytes {config.host_memory_bytes} holds no adapter: one takes up to "
            f"{arena.nbytes_per_slot} bytes at --max-lora-rank {config.max_lora_rank}"
        )

    def load(digest: str) -> SlotImage:
        with store.open(digest) as weights:
            return build_slot_image(weights, arena.layout)

    return Pager(
        load,
        arena,
        slots,
        host_bytes=config.host_memory_bytes,
        loader_threads=config.loader_threads,
        load_timeout_s=config.load_timeout,
        wake=wake,
        load_ended=metrics.load_ended,
        paged_in=metrics.paged_in,
    )


def _max_model_len(config: ExecutorConfig, spec: ModelSpec) -> int:
    """One sequence alone must fit into the KV blocks, or it would wait for ever."""
    room = config.num_kv_blocks * config.block_size
    if config.max_model_len > spec.max_model_len:
        raise StartError(f"--max-model-len {config.max_model_len} is above the model's {spec.max_model_len}")
    if config.max_model_len > room:
        raise StartError(
            f"--max-model-len {config.max_model_len} is above the {room} tokens of all KV blocks"
        )
    return config.max_model_len or min(spec.max_model_len, room)


def _info(config: ExecutorConfig, spec: ModelSpec, limits: StopLimits) -> EngineInfo:
    return EngineInfo(
        model_name=spec.name,
        model_fingerprint=spec.fingerprint,
        max_model_len=limits.max_model_len,
        max_rank=config.max_lora_rank,
        modules=tuple(config.lora_modules),
        max_loras=config.max_loras,
        max_seats=config.max_seats,
        num_kv_blocks=config.num_kv_blocks,
        block_size=config.block_size,
    )
