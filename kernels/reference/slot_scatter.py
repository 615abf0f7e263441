"""Copies an adapter's block into its slot, piece by piece."""

import torch
from torch import Tensor

from kernels.launching.slot_block import TABLE_WORDS, UNIT, check_slot_block


def slot_scatter(
    stripe: Tensor, ranks: Tensor, shrink_ranks: Tensor, scales: Tensor, slot: int, block: Tensor
) -> None:
    """Semantics: stripe[to : to + n] = weights[at : at + n] for each piece (at, to, n); ranks[:, slot],
    shrink_ranks[:, slot] and scales[:, slot] = the block's.

    stripe        one slot's weights, written in place where there is a piece; any dtype, contiguous
    ranks         int32 [slices, max_loras], its column `slot` written in place
    shrink_ranks  as ranks; may be the same tensor
    scales        float32 [slices, max_loras], as ranks
    block         uint8, as kernels/launching/slot_block.py describes it

    Raises KernelArgumentError.
    """
    check_slot_block(stripe, ranks, shrink_ranks, scales, slot, block)
    slices = len(ranks)
    words, target = block.view(torch.int32), stripe.view(torch.int32)
    sizes = [len(words) - TABLE_WORDS * slices, 6 * slices, slices, slices, slices]
    weights, pieces, own_ranks, own_shrink_ranks, own_scales = torch.split(words, sizes)
    for at, to, length in (pieces.view(-1, 3) * UNIT).tolist():
        target[to : to + length] = weights[at : at + length]
    ranks[:, slot] = own_ranks
    shrink_ranks[:, slot] = own_shrink_ranks
    scales[:, slot] = own_scales.view(torch.float32)
