"""How many slots an executor makes when it is to choose: as many as pay, beside a floor of KV blocks."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from executor.adapters.source import count_versions
from executor.batch.batcher import MAX_SCORED
from executor.config import AUTO_SLOTS, ExecutorConfig
from executor.distributed import ParallelGroup
from executor.gpu.memory import usable_bytes
from executor.layers.attention import KVCache
from executor.lora.replace import plan_layers, slot_layout
from executor.models import CausalLM, check_splits, construction, read_config
from executor.step.shard import dtype_of, lora_config_of

logger = logging.getLogger(__name__)

# Their number is compiled into kernels: few different ones share what is compiled.
SLOT_COUNTS = (8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, 256, 384, 512)
_LEAST_EXPECTED = 64  # versions, though a store has fewer when the executor starts: more may come
_MOST_ON_CPU = 64  # slots
# Of each seat, in KV blocks. A request of real traffic has 128 to 1,024 tokens and gets 64 to 256: 736 at its
# end on average, so that the seats together have a third to spare.
_TOKENS_A_SEAT = 1024
# For captured graphs, the sampler, attention's workspaces, an adapter on its way, and the allocator's gaps.
_RESERVE = 4 << 30
# A row of logits takes six bytes a token of the vocabulary while it is sampled.
_LOGIT_BYTES = 6
_GB = 1e9


@dataclass(frozen=True, slots=True)
class SlotBudget:
    """What bounds the number of slots, in bytes of one device: `memory`, all that this executor may take;
    `fixed`, what it takes beside slots and KV blocks; `kv_floor`, the KV blocks that slots must leave;
    `slot`, one slot. `versions`: those that the store has."""

    memory: int
    fixed: int
    kv_floor: int
    slot: int
    versions: int
    most: int = SLOT_COUNTS[-1]  # slots

    @property
    def room(self) -> int:
        """Slots that there is memory for; negative when even the floor does not fit."""
        return (self.memory - self.fixed - self.kv_floor) // self.slot

    def choose(self) -> int:
        """The smallest of SLOT_COUNTS that has a slot for every version, as far as there is room. The least
        of them is always taken: whether it fits at all is found when the KV blocks are made."""
        expected = max(self.versions, _LEAST_EXPECTED)
        wanted = next((count for count in SLOT_COUNTS if count >= expected), self.most)
        fitting = [count for count in SLOT_COUNTS if count <= min(wanted, self.room, self.most)]
        return max(fitting, default=SLOT_COUNTS[0])


def with_slot_count(config: ExecutorConfig) -> ExecutorConfig:
    """The settings with a number of slots, chosen here when they leave it open; the log says why.

    Raises what `build_shard` does, and AdapterStoreError when the store is not there.
    """
    if config.max_loras != AUTO_SLOTS:
        return config
    budget = _budget(replace(config, max_loras=1))
    count = budget.choose()
    logger.info(
        "--max-loras auto: %d slots of %.1f MB; the store has %d versions, and there is room for %d slots",
        count,
        budget.slot / 1e6,
        budget.versions,
        max(budget.room, 0),
    )
    logger.info(
        "--max-loras auto: of %.2f GB, weights and steps take about %.2f, and KV blocks for --max-seats %d "
        "at least %.2f",
        budget.memory / _GB,
        budget.fixed / _GB,
        config.max_seats,
        budget.kv_floor / _GB,
    )
    if budget.room < count:
        logger.warning("--max-loras auto: there is not room for %d slots beside the rest", count)
    return replace(config, max_loras=count)


def _budget(config: ExecutorConfig) -> SlotBudget:
    """The budget of settings with one slot: from the model's shapes alone, on the first rank. No other has
    more."""
    group = ParallelGroup(0, config.tensor_parallel_size)
    model_config = read_config(Path(config.model), expert_parallel=config.expert_parallel)
    check_splits(model_config, group.size)
    with construction(dtype_of(config), "meta"):
        model = CausalLM(model_config, group)
    slot, versions = slot_bytes(config, model), count_versions(config)
    if config.device == "cpu":
        # There is no card whose memory they share: as much as adapters have on their way.
        return SlotBudget(config.host_memory_bytes, 0, 0, slot, versions, _MOST_ON_CPU)
    memory = usable_bytes(config.device, config.gpu_memory_utilization)
    return SlotBudget(memory, _fixed_bytes(config, model), kv_floor(config, model), slot, versions)


def slot_bytes(config: ExecutorConfig, model: CausalLM) -> int:
    """What one slot takes on this rank."""
    lora = lora_config_of(config)
    layout = slot_layout(model, lora, plan_layers(model, lora))
    # DoRA's factors, on one rank: one for each output, but of experts.
    outputs = sum(part.out_features for part in layout.slices if not part.num_experts)
    return layout.max_block_bytes + (4 * outputs if model.group.size == 1 else 0)


def _fixed_bytes(config: ExecutorConfig, model: CausalLM) -> int:
    shapes, itemsize = model.config, dtype_of(config).itemsize
    weights = sum(parameter.nbytes for parameter in model.parameters())
    heads = config.max_full_heads * shapes.vocab_size * shapes.hidden_size * itemsize
    moe = shapes.moe
    width = moe.top_k * moe.intermediate_size if moe else shapes.intermediate_size
    rows = config.step_tokens * (8 * shapes.hidden_size + 4 * width) * itemsize
    logits = (MAX_SCORED + config.max_seats) * shapes.vocab_size * _LOGIT_BYTES
    return weights + heads + rows + logits + _RESERVE


def kv_floor(config: ExecutorConfig, model: CausalLM) -> int:
    """The blocks of the settings; else of so many tokens for each seat, and of the longest sequence."""
    cache = KVCache.allocate(1, config.block_size, model.config, dtype_of(config), "meta", model.group)
    each = min(_TOKENS_A_SEAT, config.max_model_len or _TOKENS_A_SEAT)
    tokens = max(config.max_seats * each, config.max_model_len)
    return cache.nbytes * (config.num_kv_blocks or -(-tokens // config.block_size))
