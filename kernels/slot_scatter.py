"""Copies an adapter's block into its slot on the GPU, in one launch.

The truth is kernels/reference/slot_scatter.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching.slot_block import TABLE_WORDS, UNIT, check_slot_block

_UNITS_PER_COPY = 128  # 16 KB
_PROGRAMS_PER_PIECE = 8


@triton.jit(do_not_specialize=["slot", "slices", "max_loras"])
def scatter_kernel(
    stripe, block, pieces, tables, ranks, shrink_ranks, scales, slot, slices, max_loras,
    UNIT: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Program (piece, turn) copies every num_programs(1)-th run of UNITS units of a piece."""
    piece, turn = tl.program_id(0), tl.program_id(1)
    at = tl.load(pieces + 3 * piece).to(tl.int64) * UNIT
    to = tl.load(pieces + 3 * piece + 1).to(tl.int64) * UNIT
    words = tl.load(pieces + 3 * piece + 2) * UNIT
    place = tl.arange(0, UNITS * UNIT)
    for start in range(turn * UNITS * UNIT, words, tl.num_programs(1) * UNITS * UNIT):
        there = start + place < words
        values = tl.load(block + at + start + place, mask=there, other=0)
        tl.store(stripe + to + start + place, values, mask=there)
    if (turn == 0) & (piece < slices):
        cell = piece * max_loras + slot
        tl.store(ranks + cell, tl.load(tables + piece))
        tl.store(shrink_ranks + cell, tl.load(tables + slices + piece))
        tl.store(scales + cell, tl.load(tables + 2 * slices + piece))


def slot_scatter(
    stripe: Tensor, ranks: Tensor, shrink_ranks: Tensor, scales: Tensor, slot: int, block: Tensor
) -> None:
    """Semantics: stripe[to : to + n] = weights[at : at + n] for each piece (at, to, n); ranks[:, slot],
    shrink_ranks[:, slot] and scales[:, slot] = the block's.

    stripe        one slot's weights, written in place where there is a piece; any dtype, contiguous
    ranks         int32 [slices, max_loras], its column `slot` written in place
    shrink_ranks  as ranks; may be the same tensor
    scales        float32 [slices, max_loras], as ranks
    block         uint8, as kernels/launching/slot_block.py describes it; 16-byte aligned, as the stripe is

    Raises KernelArgumentError.
    """
    check_slot_block(stripe, ranks, shrink_ranks, scales, slot, block)
    slices, max_loras = ranks.shape
    words = block.view(torch.int32)
    pieces = words[len(words) - TABLE_WORDS * slices :]
    scatter_kernel[(2 * slices, _PROGRAMS_PER_PIECE)](
        stripe=stripe.view(torch.int32), block=words, pieces=pieces, tables=pieces[6 * slices :],
        ranks=ranks, shrink_ranks=shrink_ranks, scales=scales.view(torch.int32), slot=slot, slices=slices,
        max_loras=max_loras, UNIT=UNIT, UNITS=_UNITS_PER_COPY, num_warps=4,
    )  # fmt: skip
