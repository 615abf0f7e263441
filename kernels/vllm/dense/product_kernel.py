"""x @ weight.T of few rows, between a step's shrink and its expand. Needs triton."""

import triton
import triton.language as tl

from kernels.tiles.device import let_next_kernel_start, wait_for_former_kernel


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    out, x, weight, num_rows, x_stride, weight_stride,
    WIDTH: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SWAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_N columns, split): all rows, over SHARE inputs. out: [splits, num_rows, WIDTH].

    The kernel before is a shrink of the same x, which let this one start after all before itself: so x is
    read at once, beside what that one does. SWAPPED: columns are the rows of the matrix instructions, which
    take 64 of them at least.
    """
    let_next_kernel_start(PDL)
    split = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, ROWS)
    mine = rows < num_rows
    k = split * SHARE + tl.arange(0, BLOCK_K)
    of_x = x + (rows.to(tl.int64) * x_stride)[:, None] + k[None, :]
    of_weight = weight + (n.to(tl.int64) * weight_stride)[:, None] + k[None, :]
    if SWAPPED:
        acc = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    else:
        acc = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    for _ in tl.range(0, SHARE, BLOCK_K, num_stages=STAGES):
        weight_tile = tl.load(of_weight, eviction_policy="evict_first")
        x_tile = tl.load(of_x, mask=mine[:, None], other=0.0)
        if SWAPPED:
            acc = tl.dot(weight_tile, tl.trans(x_tile), acc, input_precision="ieee")
        else:
            acc = tl.dot(x_tile, tl.trans(weight_tile), acc, input_precision="ieee")
        of_weight += BLOCK_K
        of_x += BLOCK_K
    wait_for_former_kernel(PDL)  # expand waits for this kernel alone, and reads what that one wrote
    out += tl.cast(split, tl.int64) * num_rows * WIDTH
    if SWAPPED:
        places = out + rows[None, :] * WIDTH + n[:, None]
        tl.store(places, acc.to(out.dtype.element_ty), mask=mine[None, :])
    else:
        tl.store(out + rows[:, None] * WIDTH + n[None, :], acc.to(out.dtype.element_ty), mask=mine[:, None])
