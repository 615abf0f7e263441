"""Forms and block sizes of the expert kernels, by the step and the layer's sizes.

Measured on one H100 80GB HBM3 (triton 3.6, bfloat16, CUDA graphs) with Mixtral-8x7B's expert layers, rank 16,
8 slots (kernels/bench/results/moe_tune.json), and on an H200 with Qwen3-30B-A3B's (moe_tune_qwen3.json).
(tokens, adapters) names a point, w13 the product of gate and up, w2 that of down; figures are us of one call.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import expm1

from kernels.metadata.meta import LoRAKernelMeta

# Pairs of an aligned block. 32 are as fast or slower at every point, 64 slower: (2048, 1) w13 194, 193, 213.
ALIGNED = 16
# Pairs that an adapter's expert must get on average before sharing its weights pays for alignment and for
# half empty blocks. 2.3 at (64, 8): 60.0 unaligned, 66.3 aligned. 16 at (64, 1): 43.3 and 31.8. While pairs
# are few, what they share stays in L2: Qwen3, with 4, 29.4 and 35.2 at (64, 1).
_SHARING = 3
_SHARING_OF_FEW = 6
_FEW_PAIRS = 512
# Inputs up to which a layer is narrow.
_NARROW = 2048
# From here on blocks alone fill the card.
_MANY_BLOCKS = 200
_FEW_BLOCKS = 32
# Bytes that one program can have on an H100.
_SHARED_MEMORY = 227 * 1024
# The highest rank that the form of one launch serves: all ranks are in registers.
MOST_ONCE_RANKS = 64


@dataclass(frozen=True, slots=True)
class PairConfig:
    """Two launches: shrink, cut `split` times along the inputs, then expand, which adds the splits up.

    fused: one shrink program computes all slices, so that x is read once.
    """

    block_rank: int
    block_k: int
    split: int
    fused: bool
    shrink_warps: int
    shrink_stages: int
    block_n: int
    expand_warps: int


@dataclass(frozen=True, slots=True)
class OnceConfig:
    """One launch: each of `chunks` programs a block and slice shrinks all and expands its share.

    Loads are pipelined num_stages deep along the inputs, column_stages along the columns. For narrow layers:
    at no point of Mixtral's wide ones is it faster than the pair (w13 50.2 and 39.8 at (64, 8), 193.9 and
    192.7 at (2048, 1)).
    """

    block_k: int
    block_n: int
    chunks: int
    num_warps: int
    num_stages: int
    column_stages: int


def block_size(meta: LoRAKernelMeta, topk: int, num_experts: int) -> int:
    """Pairs of a block, by how many an adapter's expert is likely to get; 1: no alignment."""
    pairs = meta.num_rows * topk
    active = max(1, meta.num_active_loras)
    if meta.plan.rows_per_item == 1:
        # A graph is captured with one slot; a plan of single rows is for steps of mostly distinct adapters.
        active = max(active, meta.plan.items // 2)
    return ALIGNED if sharing_pays(pairs, active * num_experts) else 1


def sharing_pays(pairs: int, groups: int) -> bool:
    """Whether pairs are better sorted into blocks: a group is an adapter's expert, and likely to get some."""
    # Groups that so many random choices reach.
    reached = -groups * expm1(-pairs / groups)
    sharing = _SHARING_OF_FEW if pairs <= _FEW_PAIRS else _SHARING
    return pairs >= sharing * reached


@lru_cache(maxsize=1024)
def choose(
    rows: int, blocks: int, slices: int, width: int, max_rank: int, block_rank: int, element_size: int
) -> PairConfig | OnceConfig:
    """The form and sizes for blocks of `rows` rows over `width` inputs, with ranks up to max_rank and most up
    to block_rank."""
    if rows == 1:
        return _single(blocks, width, block_rank, element_size)
    block_rank = max(16, block_rank)
    if width <= _NARROW and blocks >= _MANY_BLOCKS and max_rank <= block_rank and element_size == 2:
        # w13, w2 of Qwen3: 63.0, 42.8 at (512, 8), in two launches 65.1, 50.9; 93.0, 74.7 and 98.2, 82.1 at
        # (2048, 8); 60.3, 52.5 and 67.9, 62.2 at (2048, 1). At (64, 1), with 160 blocks, two launches win.
        if blocks < 4 * _MANY_BLOCKS:
            # 22.3, 17.5 at (512, 1), as below 27.5, 20.3.
            return OnceConfig(128, 256, 1, 4, 3, 2) if slices > 1 else OnceConfig(128, 256, 2, 4, 3, 1)
        return OnceConfig(128, 128, 1, 2, 3, 1) if slices > 1 else OnceConfig(128, 256, 1, 4, 3, 2)
    return _shared(rows, blocks, slices, width, block_rank, element_size)


def _single(blocks: int, width: int, block_rank: int, element_size: int) -> PairConfig:
    # w13 39.8 at (64, 8) with 2048 inputs and 8 warps, 43.8 with 1024 and 4; 6.0 and 5.5 at (1, 1). Narrow
    # layers in two splits: w13 of Qwen3 23.8 at (64, 8), 3.2 at (1, 1), without 26.2 and 3.9.
    inputs, warps = (1024, 4) if blocks < 8 else (2048, 8)
    if width <= _NARROW:
        inputs = (1 << (width - 1).bit_length()) // 2
        warps = 8 if inputs >= 1024 else 4
    # A program holds its tile of A in registers.
    inputs = max(16, inputs * 16 * 2 // (max(16, block_rank) * element_size))
    inputs = min(inputs, max(16, 1 << (width - 1).bit_length()))
    split = -(-width // inputs)
    # w2 at (1, 1), 14 splits: 4.4 with 256 columns, 5.4 with 512. w13, 4 splits: 6.0 and 5.5.
    return PairConfig(block_rank, inputs, split, False, warps, 2, 256 if split > 8 else 512, 2)


def _shared(
    rows: int, blocks: int, slices: int, width: int, block_rank: int, element_size: int
) -> PairConfig:
    # w13: 78.6 at (512, 8) in one program for both slices, 82.3 apart; 15.1 and 14.6 at (64, 1).
    fused = slices > 1 and blocks >= _FEW_BLOCKS
    lines = rows + block_rank * (slices if fused else 1)
    # w13 at (2048, 1): 194 with 128 inputs a step and no split, 201 with 256 and 2 splits.
    block_k = 128 if fused and blocks >= _MANY_BLOCKS else 256
    stages = 3
    while block_k * lines * element_size * (stages + 1) > _SHARED_MEMORY:
        block_k //= 2
    # w2: 13.4 to 14.0 at (64, 1) with 4 or 8 splits, 22.3 at (64, 8) with 8, 80 at (2048, 1) with 2.
    wanted = (1 if blocks >= _MANY_BLOCKS else 2) if fused else (2 if blocks >= _MANY_BLOCKS else 8)
    split = max(1, min(wanted, width // 1024))
    # w2 at (2048, 1): 80.2 with 128 columns, 84.3 with 256.
    narrow = slices == 1 and blocks >= _MANY_BLOCKS
    block_n = 128 if narrow or element_size > 2 or block_rank > 16 else 256
    return PairConfig(block_rank, block_k, split, fused, 4, stages, block_n, 4)


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """The base model's expert product, over blocks of up to `rows` pairs."""

    rows: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def gemm_block_size(pairs: int, num_experts: int) -> int:
    """Pairs of a block of the base product: about what an expert gets."""
    mean = pairs / num_experts
    for most, size in ((8, 16), (24, 32), (96, 64)):
        if mean <= most:
            return size
    return 128


def gemm_config(size: int, element_size: int) -> GemmConfig:
    """The sizes for blocks of up to `size` pairs. w13 of Mixtral, with its alignment (moe_gemm_tune.json)."""
    if element_size > 2:
        return GemmConfig(max(16, size), 64, 32, 4, 2)
    if size <= 16:
        # 8 tokens: 521; 128 inputs a step 524, 64 557.
        return GemmConfig(16, 64, 256, 4, 3)
    if size <= 32:
        # 64 tokens: 626; blocks of 16 633.
        return GemmConfig(32, 128, 128, 4, 3)
    if size <= 64:
        return GemmConfig(64, 128, 64, 4, 4)
    # 2048 tokens: 1667; 3 stages 1864, 128 columns 2300.
    return GemmConfig(128, 256, 64, 8, 4)
