"""One engine from a configuration: the only place that knows how its parts are put together."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from adapter_store import ModelSpec, WeightsSource
from executor.batcher import Batcher
from executor.blocks import BlockPool
from executor.config import ExecutorConfig
from executor.distributed import SINGLE
from executor.engine import Engine
from executor.errors import StartError
from executor.events import EngineInfo
from executor.lora.arena import SlotArena
from executor.lora.dora import DoRASlots
from executor.lora.image import SlotImage, build_slot_image
from executor.metrics import Metrics
from executor.model_runner import ModelRunner, NoOtherRanks, OtherRanks
from executor.models import check_splits, read_config
from executor.paging import Arena, Pager
from executor.ranks.leader import start_ranks
from executor.ranks.paging import SpreadAdapters
from executor.sequence import StopLimits
from executor.shard import Shard, build_shard
from executor.slots import SlotTable

logger = logging.getLogger(__name__)


def build_engine(
    config: ExecutorConfig,
    store: WeightsSource,
    *,
    metrics: Metrics | None = None,
    wake: Callable[[], None] = lambda: None,
    lost: Callable[[Exception], None] = lambda error: None,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """Load the model and everything around it, on this process and those of the other ranks. `wake` is called
    on other threads when `step` has news to see, `lost` with a RankLost when a rank has ended.

    Raises InvalidModel, UnsupportedModel, BadCheckpoint, LoRAError, StartError, RankLost.
    """
    metrics = metrics or Metrics(CollectorRegistry())
    path = Path(config.model)
    spec, model_config = ModelSpec.from_folder(path), read_config(path)
    check_splits(model_config, config.tensor_parallel_size)
    limits = StopLimits(frozenset(model_config.eos_token_ids), _max_model_len(config, spec))
    slots = SlotTable(config.max_loras)
    others, shard, adapters = _on_ranks(config, store, lost)
    try:
        pager = _pager(config, adapters, slots, metrics, wake)
    except StartError:
        others.close()
        raise
    info = _info(config, spec, limits)
    logger.info("model %s is loaded: %s", spec.name, info)
    return Engine(
        info=info,
        runner=ModelRunner(shard.model, shard.kv_cache, shard.punica, limits, others),
        batcher=_batcher(config, slots),
        pager=pager,
        limits=limits,
        vocab_size=spec.vocab_size,
        metrics=metrics,
        clock=clock,
    )


@dataclass(frozen=True, slots=True)
class _Adapters:
    """What a pager needs, for one rank or for all: its parts agree on a kind of image."""

    load: Callable[[str], Any]
    arena: Arena[Any]
    forget: Callable[[Any], None] = lambda image: None


def _on_ranks(
    config: ExecutorConfig, store: WeightsSource, lost: Callable[[Exception], None]
) -> tuple[OtherRanks, Shard, _Adapters]:
    if config.tensor_parallel_size == 1:
        shard = build_shard(config, SINGLE)
        if config.device == "cpu":  # the fused kernels of a GPU know no factors
            factors = Path(config.cache_dir) / "factors" if config.cache_dir else None
            slots = DoRASlots(shard.model, shard.arena, factors)
            return NoOtherRanks(), shard, _Adapters(partial(slots.load_image, store), slots)
        return NoOtherRanks(), shard, _Adapters(partial(_load, store, shard.arena), shard.arena)
    ranks, group = start_ranks(config, lost)
    try:
        shard = build_shard(config, group)
        nbytes = shard.arena.nbytes_per_slot + ranks.wait_ready()
    except BaseException:
        ranks.close()
        raise
    spread = SpreadAdapters(ranks, shard.arena, nbytes, partial(_load, store, shard.arena))
    return ranks, shard, _Adapters(spread.load_image, spread, spread.forget)


def _load(store: WeightsSource, arena: SlotArena, digest: str) -> SlotImage:
    with store.open(digest) as weights:
        return build_slot_image(weights, arena.layout)


def _batcher(config: ExecutorConfig, slots: SlotTable) -> Batcher:
    return Batcher(
        BlockPool(config.num_kv_blocks, config.block_size, prefix_cache=config.prefix_cache),
        slots,
        max_batched_tokens=config.max_batched_tokens,
        max_seats=config.max_seats,
        aging_s=config.adapter_aging,
    )


def _pager(
    config: ExecutorConfig,
    adapters: _Adapters,
    slots: SlotTable,
    metrics: Metrics,
    wake: Callable[[], None],
) -> Pager[Any]:
    nbytes_per_slot = adapters.arena.nbytes_per_slot
    if config.host_memory_bytes < nbytes_per_slot:
        raise StartError(
            f"--host-memory-bytes {config.host_memory_bytes} holds no adapter: one takes up to "
            f"{nbytes_per_slot} bytes at --max-lora-rank {config.max_lora_rank}"
        )
    return Pager(
        adapters.load,
        adapters.arena,
        slots,
        host_bytes=config.host_memory_bytes,
        loader_threads=config.loader_threads,
        load_timeout_s=config.load_timeout,
        wake=wake,
        load_ended=metrics.load_ended,
        forget=adapters.forget,
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
