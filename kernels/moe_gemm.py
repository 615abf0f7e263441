"""The base model's expert product on the GPU. The truth is kernels/reference/moe_gemm.py."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.launching.checks import check
from kernels.launching.moe_blocks import MoEBlocks, check_moe_gemm
from kernels.launching.moe_tuning import GemmConfig, gemm_config


@triton.jit(do_not_specialize=["num_pairs"])
def moe_gemm_kernel(
    y, x, weight, bias, routed, blocks, ids, num_pairs, y_stride, x_stride, expert_stride, weight_stride,
    K: tl.constexpr, N: tl.constexpr, DIVIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, ROUTED: tl.constexpr,
):  # fmt: skip
    """Program (block, column tile): blocks of an expert run side by side and share its weights in L2."""
    entry = blocks + tl.program_id(0) * 4
    count = tl.load(entry + 3)
    if tl.load(entry) < 0:
        return
    expert = tl.load(entry + 1).to(tl.int64)
    place = tl.arange(0, ROWS)
    there = place < count
    pairs = tl.load(ids + tl.load(entry + 2) + place, mask=there, other=0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_places = x + (pairs // DIVIDE * x_stride)[:, None] + k[None, :]
    w_places = weight + expert * expert_stride + n.to(tl.int64)[:, None] * weight_stride + k[None, :]
    acc = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        # One bound is the tile's, not the element's, where the sizes divide: that keeps the loads whole.
        x_valid = there[:, None] & (first + k < K)[None, :]
        x_tile = tl.load(x_places + first, mask=x_valid, other=0.0)
        w_valid = (n < N)[:, None] & (first + k < K)[None, :]
        w_tile = tl.load(w_places + first, mask=w_valid, other=0.0)
        acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ROUTED:
        acc *= tl.load(routed + pairs, mask=there, other=0.0).to(tl.float32)[:, None]
    at = y + (pairs * y_stride)[:, None] + n[None, :]
    tl.store(at, acc.to(y.dtype.element_ty), mask=there[:, None] & (n < N)[None, :])


def moe_gemm(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    blocks: MoEBlocks,
    *,
    bias: Tensor | None = None,
    routed_weights: Tensor | None = None,
    config: GemmConfig | None = None,
) -> None:
    """Semantics: y[p] = w[p] * (x[row(p)] @ weight[e(p)].T + bias[e(p)]), w[p] = 1 without routed_weights.

    The arguments are those of kernels/reference/moe_gemm.py; besides, rows are contiguous.
    config  block sizes. None: the tuned ones for these blocks

    Sums are float32, rounded once. Raises KernelArgumentError.
    """
    check_moe_gemm(y, x, weight, blocks, bias, routed_weights)
    for argument, tensor in (("y", y), ("x", x), ("weight", weight)):
        check(tensor.stride(-1) == 1, argument, f"must have contiguous rows, has strides {tensor.stride()}")
    check(bias is None or bias.is_contiguous(), "bias", "must be contiguous")
    config = config or gemm_config(blocks.block_size, x.element_size())
    check(config.rows >= blocks.block_size, "config", f"is for blocks of {config.rows} pairs")
    if blocks.expert_map is not None:
        y.zero_()
    if len(blocks.blocks) == 0:
        return
    moe_gemm_kernel[(len(blocks.blocks), triton.cdiv(weight.shape[1], config.block_n))](
        y, x, weight, y if bias is None else bias, y if routed_weights is None else routed_weights,
        blocks.blocks, blocks.sorted_ids, blocks.num_pairs, y.stride(0), x.stride(0), weight.stride(0),
        weight.stride(1),
        K=x.shape[1], N=weight.shape[1], DIVIDE=1 if len(x) == blocks.num_pairs else blocks.topk,
        ROWS=config.rows, BLOCK_N=config.block_n, BLOCK_K=config.block_k, HAS_BIAS=bias is not None,
        ROUTED=routed_weights is not None, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
