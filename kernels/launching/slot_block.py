"""The form in which an adapter goes to the device: one block of 32-bit words, and how it is read.

weights   whatever is copied into the slot's stripe, in pieces that are multiples of UNIT words
pieces    int32 [2 * slices, 3], two a slice: where a piece lies among the weights, where it goes in the
          stripe, and its length, all in units
ranks, shrink_ranks, scales
          [slices] each: int32, int32, and the bits of float32
"""

import torch
from torch import Tensor

from kernels.launching.checks import check, check_same_device

UNIT = 32  # words: 128 bytes, a cache line
TABLE_WORDS = 9  # after the weights, for each slice: two pieces of three, a rank, a shrink rank, a scale


def table_bytes(slices: int) -> int:
    return 4 * TABLE_WORDS * slices


def check_slot_block(
    stripe: Tensor, ranks: Tensor, shrink_ranks: Tensor, scales: Tensor, slot: int, block: Tensor
) -> None:
    slices, max_loras = ranks.shape
    check(0 <= slot < max_loras, "slot", f"{slot} is outside [0, {max_loras})")
    for argument, table, dtype in (
        ("ranks", ranks, torch.int32),
        ("shrink_ranks", shrink_ranks, torch.int32),
        ("scales", scales, torch.float32),
    ):
        fits = table.shape == ranks.shape and table.dtype == dtype and table.is_contiguous()
        check(fits, argument, f"must be a contiguous {dtype} {list(ranks.shape)}")
    check(stripe.dim() == 1 and stripe.is_contiguous(), "stripe", "must be contiguous and one-dimensional")
    check(stripe.nbytes % (4 * UNIT) == 0, "stripe", f"must be a multiple of {4 * UNIT} bytes")
    check(block.dtype == torch.uint8 and block.dim() == 1 and block.is_contiguous(), "block", "must be bytes")
    weights = block.nbytes - table_bytes(slices)
    check(0 <= weights <= stripe.nbytes, "block", f"has {block.nbytes} bytes, the stripe {stripe.nbytes}")
    check(weights % (4 * UNIT) == 0, "block", f"must hold a multiple of {4 * UNIT} bytes of weights")
    check_same_device(stripe.device, ranks=ranks, shrink_ranks=shrink_ranks, scales=scales, block=block)
