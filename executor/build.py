"""Builds the engine from a configuration: the only place that knows how its parts fit together."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from adapter_store import InvalidModel, ModelSpec, WeightsSource, kind_of
from adapter_store.base.checkpoint import has_checkpoint
from executor.adapters.host_pool import HostPool
from executor.adapters.layout_workers import LayoutWorkers
from executor.adapters.pager import Adapters, Listeners, Pager, PagerSettings
from executor.adapters.pooled import EXTRA_ALIGNMENT, PooledAdapters, max_nbytes
from executor.adapters.slot_writer import SlotWriter, WriterInTurn, make_writer
from executor.batch.batcher import Batcher
from executor.batch.blocks import BlockPool
from executor.batch.pace import Pace, StepTimes
from executor.batch.rates import RateMeter
from executor.batch.sequence import StopLimits
from executor.batch.slots import SlotTable
from executor.build_shard import build_shard
from executor.config import ExecutorConfig
from executor.distributed import SINGLE
from executor.engine import Engine
from executor.errors import StartError
from executor.events import EngineInfo
from executor.gpu.graph_plans import GraphSizes
from executor.guides.guide import Vocabulary
from executor.guides.guides import Guides
from executor.guides.workshop import Workshop
from executor.lora.arena import SlotArena
from executor.lora.full_heads import check_full_heads
from executor.lora.image import SlotImage, build_slot_image
from executor.lora.layout import ALIGNMENT
from executor.metrics import Metrics
from executor.models import check_splits, read_config
from executor.ranks.leader import start_ranks
from executor.ranks.shared_tokens import SharedTokensPass
from executor.ranks.spread_adapters import SpreadAdapters
from executor.slot_count import with_slot_count
from executor.step.forward_pass import ForwardPass
from executor.step.model_runner import ModelRunner, NoOtherRanks, OtherRanks
from executor.step.sampler import Sampler
from executor.step.shard import Shard, dtype_of, lora_dtype_of, with_fused_modules
from executor.step.token_masks import MaskBuffers
from executor.step.trace import NO_TRACE
from executor.step_trace import StepTrace
from kernels.launching.slot_block import table_bytes
from lorafleet.constraints.tokens import InvalidTokenizer, guide_tokenizer

logger = logging.getLogger(__name__)


def build_engine(
    config: ExecutorConfig,
    store: WeightsSource,
    *,
    metrics: Metrics | None = None,
    wake: Callable[[], None] = lambda: None,
    lost: Callable[[Exception], None] = lambda error: None,
    discard_copy: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """Load the model and everything around it, on this process and those of the other ranks. `wake` is called
    on other threads when `step` has news to see, `lost` with a RankLost when a rank has ended. `discard_copy`
    is the pager's.

    Raises InvalidModel, UnsupportedModel, BadCheckpoint, LoRAError, StartError, RankLost.
    """
    metrics = metrics or Metrics(CollectorRegistry())
    meter = RateMeter()
    config = with_slot_count(with_fused_modules(config))
    path = Path(config.model)
    model_config = read_config(path, expert_parallel=config.expert_parallel)
    spec = _spec(config)
    check_splits(model_config, config.tensor_parallel_size)
    slots = SlotTable(config.max_loras, config.max_full_heads)
    if config.tensor_parallel_size == 1:
        parts = _on_one_rank(config, spec, store, wake)
    else:
        parts = _on_ranks(config, store, lost)
    shard = parts.shard
    try:
        kv_blocks = shard.kv_cache.num_blocks
        limits = StopLimits(frozenset(model_config.eos_token_ids), _max_model_len(config, spec, kv_blocks))
    except StartError:
        parts.close()
        raise
    sampler = Sampler(config.max_seats, shard.kv_cache.device)
    sampler.warm_up(spec.vocab_size)
    guides = _guides(config, spec, limits, shard.kv_cache.device, wake)
    info = _info(config, spec, limits, kv_blocks, guides)
    logger.info("model %s is loaded: %s", spec.name, info)
    trace = StepTrace(Path(config.step_trace), shard.kv_cache.device) if config.step_trace else NO_TRACE
    return Engine(
        info=info,
        runner=ModelRunner(parts.forward_pass, sampler, parts.writer, limits, parts.others, trace),
        batcher=_batcher(config, slots, kv_blocks),
        pager=_pager(config, parts.adapters, slots, metrics, meter, wake, discard_copy),
        guides=guides,
        limits=limits,
        vocab_size=spec.vocab_size,
        metrics=metrics,
        clock=clock,
        pace=_pace(config),
        meter=meter,
        steps_ahead=int(config.schedules_ahead),
        trace=trace,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """What differs between one rank and several."""

    others: OtherRanks
    shard: Shard
    forward_pass: ForwardPass
    adapters: Adapters[Any]
    writer: SlotWriter

    def close(self) -> None:
        self.adapters.close()
        self.others.close()


def _on_one_rank(
    config: ExecutorConfig, spec: ModelSpec, store: WeightsSource, wake: Callable[[], None]
) -> _Parts:
    # First, so that its memory is pinned, and the processes come up, while the model loads.
    most, device = _max_image_bytes(config, spec), torch.device(config.device)
    pool = HostPool(config.host_memory_bytes, most, wake, device)
    workers = LayoutWorkers(config, most)
    try:
        shard = build_shard(config, SINGLE)
        slots, arena = shard.slots, shard.arena
        _check_host_memory(config, max_nbytes(arena.nbytes_per_slot, slots.dora, slots.full_heads))
        pool.take_in()
        if not pool.max_images:
            raise StartError(f"--host-memory-bytes {config.host_memory_bytes}: the machine gives none")
    except BaseException:
        pool.close()
        workers.close()
        raise
    writer = make_writer(arena, shard.punica)
    adapters = PooledAdapters(store, arena.layout, pool, writer, slots.dora, slots.full_heads, workers)
    return _Parts(NoOtherRanks(), shard, shard.forward_pass, adapters, writer)


def _max_image_bytes(config: ExecutorConfig, spec: ModelSpec) -> int:
    """An upper bound, before the layers are there that say it exactly."""
    total, moe = 0, spec.moe
    for place, sizes in spec.modules.items():
        within = place not in ("embed_tokens", "lm_head")
        # A slot keeps gate and up of experts apart, or together: not both.
        twice = place == "experts.w13" and "experts.w1" in spec.modules
        if twice or kind_of(f"layers.0.{place}" if within else place) not in config.lora_modules:
            continue
        experts = moe.num_experts if moe and place.startswith("experts.") else 1
        pieces = [config.max_lora_rank * size * experts + ALIGNMENT for size in sizes]
        total += (spec.num_layers if within else 1) * (
            sum(pieces) * lora_dtype_of(config).itemsize + table_bytes(1)
        )
    return total + _max_extra_bytes(config, spec)


def _max_extra_bytes(config: ExecutorConfig, spec: ModelSpec) -> int:
    """The bytes of DoRA's factors, one for each output of a layer, and of full heads; the same bound."""
    tables = {place: spec.modules[place][1] for place in ("embed_tokens", "lm_head")}
    within = sum(sizes[1] for place, sizes in spec.modules.items() if place not in tables)
    served = sum(outputs for place, outputs in tables.items() if place in config.lora_modules)
    head = spec.vocab_size * spec.hidden_size * dtype_of(config).itemsize
    factors = 4 * (spec.num_layers * within + served)
    return factors + min(2, config.max_full_heads) * head + 4 * EXTRA_ALIGNMENT


def _on_ranks(config: ExecutorConfig, store: WeightsSource, lost: Callable[[Exception], None]) -> _Parts:
    ranks, group = start_ranks(config, lost)
    started = time.monotonic()
    try:
        shard = build_shard(config, group)
        nbytes = shard.arena.nbytes_per_slot + ranks.wait_ready(time.monotonic() - started)
        _check_host_memory(config, nbytes)
    except BaseException:
        ranks.close()
        raise
    writer = WriterInTurn(shard.arena, shard.punica)
    load = partial(_load, store, shard.arena)
    adapters = SpreadAdapters(ranks, writer, nbytes, config.host_memory_bytes, load, config.load_timeout)
    return _Parts(ranks, shard, SharedTokensPass(shard.forward_pass, group), adapters, writer)


def _check_host_memory(config: ExecutorConfig, nbytes_per_slot: int) -> None:
    if config.host_memory_bytes < nbytes_per_slot:
        raise StartError(
            f"--host-memory-bytes {config.host_memory_bytes} holds no adapter: one takes up to "
            f"{nbytes_per_slot} bytes at --max-lora-rank {config.max_lora_rank}"
        )


def _load(store: WeightsSource, arena: SlotArena, digest: str) -> SlotImage:
    with store.open(digest) as weights:
        check_full_heads(weights, None)  # ConfigError: none on several ranks
        return build_slot_image(weights, arena.layout)


def _spec(config: ExecutorConfig) -> ModelSpec:
    path = Path(config.model)
    if config.load_format == "dummy" and not has_checkpoint(path):
        return ModelSpec.from_config_alone(path)
    return ModelSpec.from_folder(path)


def _batcher(config: ExecutorConfig, slots: SlotTable, kv_blocks: int) -> Batcher:
    return Batcher(
        BlockPool(kv_blocks, config.block_size, prefix_cache=config.prefix_cache),
        slots,
        max_batched_tokens=config.step_tokens,
        max_seats=config.max_seats,
        max_page_ins=config.page_ins_per_step,
        aging_s=config.adapter_aging,
    )


def _pace(config: ExecutorConfig) -> Pace:
    captures = config.cuda_graphs and config.device != "cpu"
    sizes = GraphSizes.up_to(config.max_seats, config.step_tokens, config.captured_rows)
    times = StepTimes(sizes.mixed if captures else (), config.step_tokens)
    bound_s = {-1.0: None, 0.0: math.inf}.get(config.max_step_ms, config.max_step_ms / 1000)
    return Pace(times, config.step_tokens, bound_s)


def _pager(
    config: ExecutorConfig,
    adapters: Adapters[Any],
    slots: SlotTable,
    metrics: Metrics,
    meter: RateMeter,
    wake: Callable[[], None],
    discard_copy: Callable[[str], None] | None,
) -> Pager[Any]:
    def load_ended(result: str, seconds: float) -> None:
        metrics.load_ended(result, seconds)
        if result == "ok":
            meter.loaded(seconds)

    def page_in_took(seconds: float) -> None:
        metrics.page_in_took(seconds)
        meter.paged_in(seconds)

    return Pager(
        adapters,
        slots,
        PagerSettings(config.host_memory_bytes, config.loader_threads, config.load_timeout),
        Listeners(wake, load_ended, metrics.paged_in, page_in_took),
        discard_copy,
    )


def _max_model_len(config: ExecutorConfig, spec: ModelSpec, kv_blocks: int) -> int:
    """One sequence alone must fit into the KV blocks, or it would wait for ever."""
    room = kv_blocks * config.block_size
    if config.max_model_len > spec.max_model_len:
        raise StartError(f"--max-model-len {config.max_model_len} is above the model's {spec.max_model_len}")
    if config.max_model_len > room:
        raise StartError(
            f"--max-model-len {config.max_model_len} is above the {room} tokens of all KV blocks"
        )
    return config.max_model_len or min(spec.max_model_len, room)


def _guides(
    config: ExecutorConfig,
    spec: ModelSpec,
    limits: StopLimits,
    device: torch.device,
    wake: Callable[[], None],
) -> Guides:
    try:
        tokenizer = guide_tokenizer(Path(config.model), spec.vocab_size, limits.eos_token_ids)
    except (InvalidTokenizer, InvalidModel) as error:
        logger.warning("answers cannot be held to constraints: %s", error)
        tokenizer = None
    vocabulary = Vocabulary(spec.vocab_size, limits.eos_token_ids)
    buffers = MaskBuffers(config.max_seats, spec.vocab_size, device)
    return Guides(Workshop(tokenizer, vocabulary, wake), buffers)


def _info(
    config: ExecutorConfig, spec: ModelSpec, limits: StopLimits, kv_blocks: int, guides: Guides
) -> EngineInfo:
    return EngineInfo(
        model_name=spec.name,
        model_dtype=config.model_dtype,
        model_fingerprint=spec.fingerprint,
        max_model_len=limits.max_model_len,
        max_rank=config.max_lora_rank,
        modules=tuple(config.lora_modules),
        max_full_heads=config.max_full_heads,
        max_loras=config.max_loras,
        max_seats=config.max_seats,
        num_kv_blocks=kv_blocks,
        block_size=config.block_size,
        knows_constraints=guides.knows_constraints,
    )
