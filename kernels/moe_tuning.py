"""Forms and block sizes of the expert kernels."""

from dataclasses import dataclass
from math import expm1

from kernels.meta import LoRAKernelMeta


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

    Loads are pipelined num_stages deep along the inputs, column_stages along the columns.
    """

    block_k: int
    block_n: int
    chunks: int
    num_warps: int
    num_stages: int
    column_stages: int


# The highest rank that one launch serves: all ranks are in registers.
MOST_ONCE_RANKS = 64


def block_size(meta: LoRAKernelMeta, topk: int, num_experts: int) -> int:
    """Pairs of a block, by how many an adapter's expert is likely to get; 1: no alignment."""
    pairs = meta.num_rows * topk
    groups = max(1, meta.num_active_loras) * num_experts
    # Groups that so many random choices reach.
    reached = -groups * expm1(-pairs / groups)
    mean = pairs / max(1.0, reached)
    if mean < 1.5:
        return 1
    return 16 if mean < 24 else 32


def choose(
    rows: int, blocks: int, slices: int, width: int, columns: int, max_rank: int, element_size: int
) -> PairConfig | OnceConfig:
    """For blocks of `rows` rows over `width` inputs, with `columns` outputs a slice."""
    programs = blocks * slices
    if max_rank <= MOST_ONCE_RANKS and width <= 2048 and programs >= 64:
        return OnceConfig(256 if rows == 1 else 128, 256, 1, 4, 3, 1)
    block_rank = min(64, max(16, 1 << (max_rank - 1).bit_length()))
    block_k = 1024 if rows == 1 else 128 if rows > 16 or element_size > 2 else 256
    split = max(1, min(8, -(-width // block_k), -(-512 // max(1, programs))))
    return PairConfig(
        block_rank, block_k, split, rows > 16, 4, 3, 512 if rows == 1 else 256, 2 if rows == 1 else 4
    )


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
    return 16 if mean <= 16 else 64 if mean <= 96 else 128


def gemm_config(block_size: int, element_size: int) -> GemmConfig:
    if element_size > 2:
        return GemmConfig(max(16, block_size), 64, 32, 4, 2)
    if block_size <= 16:
        return GemmConfig(16, 128, 128, 4, 4)
    if block_size <= 64:
        return GemmConfig(64, 128, 64, 4, 4)
    return GemmConfig(128, 256, 64, 8, 3)
