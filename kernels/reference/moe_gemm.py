"""The base model's expert product: each choice of a row times the weight of its expert."""

from torch import Tensor

from kernels.launching.checks import check
from kernels.launching.moe_blocks import MoEBlocks, check_moe_gemm


def moe_gemm(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    blocks: MoEBlocks,
    *,
    bias: Tensor | None = None,
    routed_weights: Tensor | None = None,
) -> None:
    """Semantics: y[p] = w[p] * (x[row(p)] @ weight[e(p)].T + bias[e(p)]), w[p] = 1 without routed_weights.

    y        floating [pairs, out], overwritten; zero for pairs whose expert is elsewhere
    x        [rows, in] or [pairs, in], as y
    weight   [experts, out, in], as y
    blocks   from moe_align_block_size
    bias     [experts, out], as y
    routed_weights  floating [rows, topk]

    Raises KernelArgumentError.
    """
    check_moe_gemm(y, x, weight, blocks, bias, routed_weights)
    check(blocks.aligned, "blocks", "must have a table")
    y.zero_()
    for slot, expert, first, count in blocks.blocks.tolist():
        if slot < 0:
            continue
        pairs = blocks.sorted_ids[first : first + count].long()
        rows = x[pairs if len(x) == blocks.num_pairs else pairs // blocks.topk]
        product = rows @ weight[expert].T
        if bias is not None:
            product += bias[expert]
        if routed_weights is not None:
            product *= routed_weights.view(-1)[pairs, None]
        y[pairs] = product.to(y.dtype)
