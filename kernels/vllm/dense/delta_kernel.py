"""The sum of a product and what adapters add to it, where both were made by themselves. Needs triton."""

import triton
import triton.language as tl

from kernels.tiles.device import wait_for_former_kernel


@triton.jit
def add_delta_kernel(
    y, delta, token_lora_mapping,
    WIDTH: tl.constexpr, MAX_LORAS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (COLUMNS columns, row): y += delta where the row has an adapter; else delta is not written."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(token_lora_mapping + row)
    wait_for_former_kernel(PDL)
    if (slot >= 0) & (slot < MAX_LORAS):
        n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        places, valid = row * WIDTH + n, n < WIDTH
        total = tl.load(y + places, mask=valid).to(tl.float32) + tl.load(delta + places, mask=valid).to(
            tl.float32
        )
        tl.store(y + places, total.to(y.dtype.element_ty), mask=valid)
