"""An expert layer's LoRA: every pair through its adapter's own weights for its expert."""

from collections.abc import Sequence

from torch import Tensor

from kernels.launching.checks import check
from kernels.launching.moe_blocks import MoEBlocks, check_fused_moe_lora


def fused_moe_lora(
    y: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    ranks: Tensor,
    scales: Tensor,
    column_starts: Sequence[int],
    blocks: MoEBlocks,
    *,
    routed_weights: Tensor | None = None,
    add_inputs: bool = True,
) -> None:
    """Semantics: y[p, start_s:start_s + out_s] += w[p] * (scale * x[row(p)] @ A_s[slot, e].T) @ B_s[slot, e].

    p is a pair (row, k) of `blocks` with its slot and expert e; A and B count up to rank ranks[s, slot, e];
    scale = scales[s, slot, e]; w[p] = 1 without routed_weights. row(p) is p itself where x has a row a pair.

    y              floating [pairs, columns], changed in place; pairs of no block and other columns stay
    x              floating [rows, in] or [pairs, in]
    lora_a         slices of [max_loras, experts, max_rank, in], strided views; a rank row >= r is never read
    lora_b         rank-major slices of [max_loras, experts, max_rank, out_s], likewise
    ranks          int32 [slices, max_loras, experts]; 0: the slot has nothing for that expert
    scales         float32, as ranks
    column_starts  first column of each slice in y
    blocks         from moe_lora_align_block_size
    routed_weights floating [rows, topk]: the router's weights, where they belong to this product
    add_inputs     False overwrites a block's pairs instead of adding (with zeros where r is 0)

    Sums are float32, the scale is applied to the shrunk row, y is rounded once. Raises KernelArgumentError.
    """
    stacks = tuple(lora_a), tuple(lora_b)
    check_fused_moe_lora(y, x, *stacks, ranks, scales, tuple(column_starts), blocks, routed_weights)
    check(blocks.aligned, "blocks", "must have a table")
    rank_table, scale_table = ranks.tolist(), scales.tolist()
    for slot, expert, first, count in blocks.blocks.tolist():
        if slot < 0:
            continue
        pairs = blocks.sorted_ids[first : first + count].long()
        rows = x[pairs if len(x) == blocks.num_pairs else pairs // blocks.topk].float()
        weights = None if routed_weights is None else routed_weights.view(-1)[pairs, None].float()
        for s, (a, b, start) in enumerate(zip(*stacks, column_starts, strict=True)):
            rank = min(rank_table[s][slot][expert], a.shape[2])
            columns = slice(start, start + b.shape[3])
            if not add_inputs:
                y[pairs, columns] = 0
            if rank > 0:
                h = rows @ a[slot, expert, :rank].float().T * scale_table[s][slot][expert]
                h = h if weights is None else h * weights
                y[pairs, columns] = (y[pairs, columns] + h @ b[slot, expert, :rank].float()).to(y.dtype)
