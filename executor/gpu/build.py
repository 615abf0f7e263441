"""Builds one rank's shard on a GPU: measures memory, compiles kernels and captures steps.

Needs triton; attention of prompts is FlashInfer's where that serves the model, else torch's.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import torch

from executor.config import ExecutorConfig
from executor.distributed import SINGLE, ParallelGroup
from executor.errors import StartError
from executor.gpu.attention.flashinfer import FlashInfer, Form, compile_for, serves
from executor.gpu.attention.none import NoAttention
from executor.gpu.attention.plain import TorchAttention
from executor.gpu.attention.planner import StepPlanner
from executor.gpu.compile_ahead import Compilation
from executor.gpu.cuda_graphs import GraphMemory
from executor.gpu.graph_plans import GraphSizes, LoRAPlans
from executor.gpu.graphed_pass import GraphedForwardPass
from executor.gpu.memory import blocks_that_fit, log_captured, measure
from executor.gpu.warm_up import StepLimits, WarmUpStep, warm_up_steps
from executor.layers.attention import KVCache
from executor.layers.linear import kv_head_share
from executor.layers.model_config import ModelConfig
from executor.layers.triton_followers import TritonFollowers
from executor.models import CausalLM, load_model, read_config
from executor.start_log import start_part
from executor.step.forward_pass import ForwardPass
from executor.step.sampler import Sampler
from executor.step.shard import Shard, Slots, attach_slots, check_lora_dtype, dtype_of
from kernels import paged_decode
from kernels.punica_gpu import PunicaWrapperGPU

logger = logging.getLogger(__name__)

_NO_GRAPHS = GraphSizes((), ())
# Keys and values of two steps of kernels/paged_decode.py fill the shared memory of a multiprocessor.
_MOST_HEAD_BYTES = 512


def build_gpu_shard(config: ExecutorConfig, group: ParallelGroup) -> Shard:
    """The same as `executor.build_shard.build_shard`."""
    device = _device(config, group)
    started = time.monotonic()
    compilation = Compilation(config) if group.size == 1 else None
    if compilation:
        compilation.start()
    builder = _builder(config, group, device)
    kv_cache, forward_pass = builder.build()
    if compilation:
        compilation.done()
    logger.info("everything is compiled after %.1f s", time.monotonic() - started)
    return Shard(builder.model, kv_cache, builder.punica, builder.slots, forward_pass)


def compile_part(config: ExecutorConfig, part: int, parts: int) -> None:
    """Launch each `parts`-th kernel once, from the `part`-th on; attention's are `compile_attention`'s."""
    _builder(config, SINGLE, _device(config, SINGLE), NoAttention()).compile(part, parts)


def compile_attention(config: ExecutorConfig, form: Form) -> None:
    """One of FlashInfer's forms, if the model has it."""
    model = read_config(Path(config.model))
    compile_for(model, dtype_of(config), _device(config, SINGLE), form)


def compile_sampler(config: ExecutorConfig) -> None:
    """What draws tokens, in every way."""
    vocab = read_config(Path(config.model)).vocab_size
    Sampler(config.max_seats, _device(config, SINGLE)).warm_up(vocab)


def _builder(
    config: ExecutorConfig, group: ParallelGroup, device: torch.device, attention: StepPlanner | None = None
) -> "_Builder":
    dummy = config.load_format == "dummy"
    with start_part(f"making the model and its slots on {device}"):
        model = load_model(
            Path(config.model), dtype_of(config), device, group,
            dummy=dummy, expert_parallel=config.expert_parallel,
        )  # fmt: skip
        punica = PunicaWrapperGPU(config.max_loras, config.step_tokens, device)
        slots = attach_slots(config, model, punica)
    return _Builder(config, group, device, model, punica, slots, attention)


def _device(config: ExecutorConfig, group: ParallelGroup) -> torch.device:
    """`cuda` is the rank's own GPU."""
    device = torch.device(config.device)
    if device.index is None:
        device = torch.device("cuda", group.rank)
    if not torch.cuda.is_available() or device.index >= torch.cuda.device_count():
        raise StartError(f"--device {config.device}: there are {torch.cuda.device_count()} GPUs")
    torch.cuda.set_device(device)
    check_lora_dtype(config, torch.cuda.get_device_capability(device))
    return device


def _decodes(config: ModelConfig, heads: int, kv_heads: int, dtype: torch.dtype) -> bool:
    """Whether the attention of captured decode steps serves the model."""
    narrow = config.head_dim * dtype.itemsize <= _MOST_HEAD_BYTES
    uncapped = config.soft_caps.scores is None
    return narrow and uncapped and paged_decode.serves(heads, kv_heads, config.head_dim)


class _Builder:
    def __init__(
        self,
        config: ExecutorConfig,
        group: ParallelGroup,
        device: torch.device,
        model: CausalLM,
        punica: PunicaWrapperGPU,
        slots: Slots,
        attention: StepPlanner | None,
    ) -> None:
        """attention: None for the fastest that serves the model."""
        self.model, self.punica, self.slots = model, punica, slots
        self._config, self._group, self._device, self._dtype = config, group, device, dtype_of(config)
        self._limits = StepLimits(
            max_rows=config.step_tokens,
            max_sequences=config.max_seats,
            max_model_len=config.max_model_len or model.config.max_position_embeddings,
            max_loras=config.max_loras,
            max_rank=config.max_lora_rank,
        )
        heads = model.config.num_heads // group.size
        kv_heads = len(kv_head_share(model.config.num_kv_heads, group))
        self._captures = config.cuda_graphs and _decodes(model.config, heads, kv_heads, self._dtype)
        self._attention = attention or self._fastest_attention(heads, kv_heads)

    def _fastest_attention(self, heads: int, kv_heads: int) -> StepPlanner:
        model = self.model.config
        if serves(model, self._dtype, self._device):
            with start_part(
                f"FlashInfer's attention for {self._dtype}, compiled by nvcc where it is not yet"
            ):
                return FlashInfer(model, heads, kv_heads, self._dtype, self._device)
        logger.warning(
            "FlashInfer is not installed or does not serve this model: attention of prompts is torch's"
        )
        return TorchAttention(model.windows)

    def build(self) -> tuple[KVCache, ForwardPass]:
        spare = self._cache(0)
        profiled = self._pass(spare, _NO_GRAPHS)
        largest = self.slots.arena.nbytes_per_slot
        use = measure(self._device, lambda: self._run_largest(profiled, spare), largest)
        blocks = self._config.num_kv_blocks
        if not blocks:
            least = -(-self._config.max_model_len // self._config.block_size) or 1
            utilization = self._config.gpu_memory_utilization
            blocks = blocks_that_fit(use, utilization, spare.nbytes, least)
            blocks = self._least_of_all_ranks(blocks)
        kv_cache = self._cache(blocks)
        forward_pass = self._pass(kv_cache, self._sizes())
        log_captured(self._device, forward_pass.warm_up)
        return kv_cache, forward_pass

    def compile(self, part: int, parts: int) -> None:
        kv_cache = self._cache(self._config.num_kv_blocks)
        eager = self._pass(kv_cache, _NO_GRAPHS)
        for step in islice(self._warm_up_steps(kv_cache), part, None, parts):
            eager.rehearse_eager(step)
        self._pass(kv_cache, self._sizes()).rehearse(part, parts)
        torch.cuda.synchronize(self._device)

    def _sizes(self) -> GraphSizes:
        limits = self._limits
        # Collectives are captured too: every rank captures and replays the same steps in the same order.
        if not self._captures:
            return _NO_GRAPHS
        return GraphSizes.up_to(limits.max_sequences, limits.max_rows, self._config.captured_rows)

    def _cache(self, blocks: int) -> KVCache:
        config = self._config
        return KVCache.allocate(
            blocks, config.block_size, self.model.config, self._dtype, self._device, self._group
        )

    def _pass(self, kv_cache: KVCache, sizes: GraphSizes) -> GraphedForwardPass:
        return GraphedForwardPass(
            self.model,
            kv_cache,
            self.punica,
            self._attention,
            TritonFollowers(),
            self._limits,
            sizes,
            LoRAPlans(self._config.max_loras, self._config.max_lora_rank),
            GraphMemory(self._device),
            head_has_lora="lm_head" in self._config.lora_modules or self.slots.full_heads is not None,
            marks=self.slots.marks,
        )

    def _run_largest(self, forward_pass: GraphedForwardPass, kv_cache: KVCache) -> None:
        with start_part("running the largest steps, and one for each choice of kernels") as part:
            for step in self._warm_up_steps(kv_cache):
                forward_pass.rehearse_eager(step)
                part.advance()

    def _warm_up_steps(self, kv_cache: KVCache) -> Iterator[WarmUpStep]:
        experts = self.model.config.moe is not None
        yield from warm_up_steps(self._limits, kv_cache, experts=experts)
        if self.slots.marks:
            with ExitStack() as stack:
                for marks in self.slots.marks:
                    stack.enter_context(marks.as_if_all())
                yield from warm_up_steps(self._limits, kv_cache, experts=experts)

    def _least_of_all_ranks(self, blocks: int) -> int:
        counts = self._group.all_gather(torch.tensor([blocks], device=self._device))
        return int(counts.min())
