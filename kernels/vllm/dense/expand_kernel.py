"""h @ B.T for rows of many adapters, from the reference API's description of a step. Needs triton."""

import triton
import triton.language as tl

from kernels.tiles.device import let_next_kernel_start, of_slice, wait_for_former_kernel
from kernels.vllm.dense.groups import (
    groups_of,
    load_group,
    load_member,
    load_places,
    load_work,
    rows_of_groups,
)


@triton.jit
def _load_b(b, b_stride, r, n, width, MAX_RANK: tl.constexpr):
    """[columns, ranks]: the rank is innermost."""
    valid = (n < width)[:, None] & (r < MAX_RANK)[None, :]
    return tl.load(b + n[:, None] * b_stride + r[None, :], mask=valid, other=0.0)


@triton.jit
def _sum_of_splits(places, valid, split_stride, SPLIT: tl.constexpr):
    total = tl.load(places, mask=valid, other=0.0).to(tl.float32)
    for i in tl.static_range(1, SPLIT):
        total += tl.load(places + i * split_stride, mask=valid, other=0.0).to(tl.float32)
    return total


@triton.jit
def _inputs(y, parts, valid, part_stride, PARTS: tl.constexpr):
    """What is there already: in y, or in PARTS parts whose sum it is."""
    if PARTS:
        return _sum_of_splits(parts, valid, part_stride, PARTS)
    else:
        return tl.load(y, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _one_row(
    y, parts, h, b, row, n, width, b_stride, split_stride, part_stride,
    MAX_RANK: tl.constexpr, SPLIT: tl.constexpr, BLOCK_RANK: tl.constexpr, ADD_INPUTS: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y and `parts` are the row's."""
    r = tl.arange(0, BLOCK_RANK)
    b_tile = _load_b(b, b_stride, r, n, width, MAX_RANK)
    wait_for_former_kernel(PDL)
    h_row = h + row * MAX_RANK
    if ADD_INPUTS:
        before = _inputs(y + n, parts + n, n < width, part_stride, PARTS)
    h_tile = _sum_of_splits(h_row + r, r < MAX_RANK, split_stride, SPLIT)
    acc = tl.sum(b_tile.to(tl.float32) * h_tile[None, :], 1)
    for block in tl.static_range(BLOCK_RANK, MAX_RANK, BLOCK_RANK):
        h_tile = _sum_of_splits(h_row + block + r, block + r < MAX_RANK, split_stride, SPLIT)
        b_tile = _load_b(b, b_stride, block + r, n, width, MAX_RANK)
        acc += tl.sum(b_tile.to(tl.float32) * h_tile[None, :], 1)
    if ADD_INPUTS:
        acc += before
    tl.store(y + n, acc.to(y.dtype.element_ty), mask=n < width)


@triton.jit
def _group(
    y, parts, h, b, rows, mine, n, width, y_stride, b_stride, split_stride, part_stride,
    MAX_RANK: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_N: tl.constexpr, ADD_INPUTS: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, BLOCK_RANK)
    b_tile = _load_b(b, b_stride, r, n, width, MAX_RANK)
    places = y + (rows * y_stride)[:, None] + n[None, :]
    valid = mine[:, None] & (n < width)[None, :]
    h_rows = h + (rows * MAX_RANK)[:, None]
    wait_for_former_kernel(PDL)
    if ADD_INPUTS:
        part_places = parts + (rows * ALL)[:, None] + n[None, :]
        before = _inputs(places, part_places, valid, part_stride, PARTS)
    h_tile = _sum_of_splits(h_rows + r[None, :], mine[:, None] & (r < MAX_RANK)[None, :], split_stride, SPLIT)
    acc = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    acc = tl.dot(h_tile.to(b_tile.dtype), tl.trans(b_tile), acc, input_precision="ieee")
    for block in tl.static_range(BLOCK_RANK, MAX_RANK, BLOCK_RANK):
        more = mine[:, None] & (block + r < MAX_RANK)[None, :]
        h_tile = _sum_of_splits(h_rows + block + r[None, :], more, split_stride, SPLIT)
        b_tile = _load_b(b, b_stride, block + r, n, width, MAX_RANK)
        acc = tl.dot(h_tile.to(b_tile.dtype), tl.trans(b_tile), acc, input_precision="ieee")
    if ADD_INPUTS:
        acc += before
    tl.store(places, acc.to(y.dtype.element_ty), mask=valid)


@triton.jit
def _wide_group(
    y, h, b, rows, mine, column, width, y_stride, b_stride, split_stride,
    MAX_RANK: tl.constexpr, SPLIT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_N: tl.constexpr, ADD_INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As _group, over COLUMNS columns, of a rank that fits a block: h is read once."""
    r = tl.arange(0, BLOCK_RANK)
    wait_for_former_kernel(PDL)
    h_rows = h + (rows * MAX_RANK)[:, None] + r[None, :]
    h_tile = _sum_of_splits(h_rows, mine[:, None] & (r < MAX_RANK)[None, :], split_stride, SPLIT)
    h_tile = h_tile.to(b.dtype.element_ty)
    y_rows = y + (rows * y_stride)[:, None]
    for begin in range(0, COLUMNS, BLOCK_N):
        n = column + begin + tl.arange(0, BLOCK_N)
        valid = mine[:, None] & (n < width)[None, :]
        b_tile = _load_b(b, b_stride, r, n, width, MAX_RANK)
        acc = tl.dot(h_tile, tl.trans(b_tile), input_precision="ieee")
        if ADD_INPUTS:
            acc += tl.load(y_rows + n[None, :], mask=valid, other=0.0).to(tl.float32)
        tl.store(y_rows + n[None, :], acc.to(y.dtype.element_ty), mask=valid)


@triton.jit
def _is_zero(
    h, rows, mine, split_stride,
    MAX_RANK: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    most = tl.zeros([ROWS, BLOCK_RANK], dtype=tl.float32)
    for block in tl.static_range(0, MAX_RANK, BLOCK_RANK):
        r = block + tl.arange(0, BLOCK_RANK)
        places = h + (rows * MAX_RANK)[:, None] + r[None, :]
        tile = _sum_of_splits(places, mine[:, None] & (r < MAX_RANK)[None, :], split_stride, SPLIT)
        most = tl.maximum(most, tl.abs(tile), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(tl.max(most, 1), 0) == 0.0


@triton.jit
def _slice_of(
    tile, h, b0, b1, b2, num_rows, slot_stride0, slot_stride1, slot_stride2,
    WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr,
    START0: tl.constexpr, START1: tl.constexpr, START2: tl.constexpr,
    SLICES: tl.constexpr, MAX_RANK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """(start in y, h, b, its stride of slots, first column, width) of the slice that a tile of COLUMNS is in.

    The tiles of all slices follow each other.
    """
    TILES0: tl.constexpr = (WIDTH0 + COLUMNS - 1) // COLUMNS
    TILES1: tl.constexpr = TILES0 + (WIDTH1 + COLUMNS - 1) // COLUMNS
    s = (tile >= TILES0).to(tl.int32) + (tile >= TILES1).to(tl.int32)
    first = (tile - of_slice(s, 0, TILES0, TILES1, 3)) * COLUMNS
    start = of_slice(s, START0, START1, START2, SLICES)
    h += tl.cast(s, tl.int64) * num_rows * MAX_RANK
    b = of_slice(s, b0, b1, b2, SLICES)
    slot_stride = of_slice(s, slot_stride0, slot_stride1, slot_stride2, SLICES)
    return start, h, b, slot_stride, first, of_slice(s, WIDTH0, WIDTH1, WIDTH2, 3)


@triton.jit
def _of_slot(b, slot, slot_stride, ALIGNED: tl.constexpr):
    b += slot.to(tl.int64) * slot_stride
    if ALIGNED:  # a choice of pointers hides it from the compiler
        b = tl.multiple_of(b, 16)
    return b


@triton.jit(do_not_specialize=["num_rows"])
def expand_members_kernel(
    y, h, b0, b1, b2, order, counts, starts, lora_ids, work, mapping, parts,
    num_rows, y_stride, slot_stride0, slot_stride1, slot_stride2, b_stride,
    WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr,
    START0: tl.constexpr, START1: tl.constexpr, START2: tl.constexpr,
    SLICES: tl.constexpr, MAX_LORAS: tl.constexpr, NUM_IDS: tl.constexpr, LANES: tl.constexpr,
    MAX_RANK: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, ALONE_N: tl.constexpr, ADD_INPUTS: tl.constexpr,
    PARTS: tl.constexpr, ALL: tl.constexpr, ROWS_A_SLOT: tl.constexpr, TOLD: tl.constexpr,
    ALIGNED: tl.constexpr, SKIP_ZEROS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (COLUMNS columns of a slice, place): for its row, or its share of them for its team's rows.

    TOLD: so many entries `work` has, which says what each place is; 0: the program finds out.
    SKIP_ZEROS: look at h before B is read, and do nothing where all of it is zero. PARTS: what is added to
    are so many parts, float32 [PARTS, num_rows, ALL], and rows that `mapping` gives no slot are their sum.
    """
    let_next_kernel_start(PDL)
    tile, place = tl.program_id(0), tl.program_id(1)
    if TOLD:
        slot, first, members, number, row = load_work(work, place, TOLD)
    else:
        slot, first, members, number = load_member(
            counts, starts, lora_ids, place, num_rows, MAX_LORAS, NUM_IDS, LANES, ROWS, ROWS_A_SLOT
        )
        row = tl.load(order + place, mask=members == 1, other=0).to(tl.int64)
    start_in_y, h, b, slot_stride, column, width = _slice_of(
        tile, h, b0, b1, b2, num_rows, slot_stride0, slot_stride1, slot_stride2, WIDTH0, WIDTH1, WIDTH2,
        START0, START1, START2, SLICES, MAX_RANK, COLUMNS,
    )  # fmt: skip
    part_stride = tl.cast(num_rows, tl.int64) * ALL
    y += start_in_y
    if PARTS:
        parts += start_in_y
        of_row = tl.load(mapping + place)
        if (of_row < 0) | (of_row >= MAX_LORAS):
            wait_for_former_kernel(PDL)
            for start in range(0, COLUMNS, ALONE_N):
                n = column + start + tl.arange(0, ALONE_N)
                total = _sum_of_splits(parts + place.to(tl.int64) * ALL + n, n < width, part_stride, PARTS)
                y_row = y + place.to(tl.int64) * y_stride
                tl.store(y_row + n, total.to(y.dtype.element_ty), mask=n < width)
    if (members == 0) | (slot < 0):
        wait_for_former_kernel(PDL)
        return
    b = _of_slot(b, slot, slot_stride, ALIGNED)
    split_stride = tl.cast(SLICES, tl.int64) * num_rows * MAX_RANK
    if SKIP_ZEROS:
        wait_for_former_kernel(PDL)
        rows, mine = load_places(order, first, first, first + members, ROWS)
        if _is_zero(h, rows, mine, split_stride, MAX_RANK, SPLIT, ROWS, BLOCK_RANK):
            return
    if members == 1:
        for start in range(0, COLUMNS, ALONE_N):
            n = column + start + tl.arange(0, ALONE_N)
            _one_row(
                y + row * y_stride, parts + row * ALL, h, b, row, n, width, b_stride, split_stride,
                part_stride, MAX_RANK, SPLIT, BLOCK_RANK, ADD_INPUTS, PARTS, PDL,
            )  # fmt: skip
    else:
        rows, mine = load_places(order, first, first, first + members, ROWS)
        for start in range(number * BLOCK_N, COLUMNS, members * BLOCK_N):
            n = column + start + tl.arange(0, BLOCK_N)
            _group(
                y, parts, h, b, rows, mine, n, width, y_stride, b_stride, split_stride, part_stride, MAX_RANK,
                SPLIT, ROWS, BLOCK_RANK, BLOCK_N, ADD_INPUTS, PARTS, ALL, PDL,
            )  # fmt: skip
    wait_for_former_kernel(PDL)


@triton.jit(do_not_specialize=["num_rows"])
def expand_tiles_kernel(
    y, h, b0, b1, b2, order, counts, starts, lora_ids,
    num_rows, y_stride, slot_stride0, slot_stride1, slot_stride2, b_stride,
    WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr,
    START0: tl.constexpr, START1: tl.constexpr, START2: tl.constexpr,
    SLICES: tl.constexpr, MAX_LORAS: tl.constexpr, NUM_IDS: tl.constexpr, LANES: tl.constexpr,
    MAX_RANK: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, ADD_INPUTS: tl.constexpr, FILL: tl.constexpr,
    ALIGNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (COLUMNS columns of a slice, tile): all groups of the tile's rows. FILL: zeros for the rest."""
    let_next_kernel_start(PDL)
    column_tile, tile = tl.program_id(0), tl.program_id(1)
    first_group, num_groups = groups_of(counts, starts, tile * ROWS, ROWS, NUM_IDS, LANES)
    start_in_y, h, b, slot_stride, column, width = _slice_of(
        column_tile, h, b0, b1, b2, num_rows, slot_stride0, slot_stride1, slot_stride2, WIDTH0, WIDTH1,
        WIDTH2, START0, START1, START2, SLICES, MAX_RANK, COLUMNS,
    )  # fmt: skip
    y += start_in_y
    split_stride = tl.cast(SLICES, tl.int64) * num_rows * MAX_RANK
    place = tile * ROWS + tl.arange(0, ROWS)
    written = place < 0
    for i in range(num_groups):
        slot, start, count = load_group(
            counts, starts, lora_ids, first_group + i, num_rows, MAX_LORAS, NUM_IDS
        )
        rows, mine = load_places(order, tile * ROWS, start, start + count, ROWS)
        if slot >= 0:
            written |= mine
            of_slot = _of_slot(b, slot, slot_stride, ALIGNED)
            if MAX_RANK <= BLOCK_RANK:
                _wide_group(
                    y, h, of_slot, rows, mine, column, width, y_stride, b_stride, split_stride, MAX_RANK,
                    SPLIT, COLUMNS, BLOCK_RANK, BLOCK_N, ADD_INPUTS, PDL,
                )  # fmt: skip
            else:
                for begin in range(0, COLUMNS, BLOCK_N):
                    n = column + begin + tl.arange(0, BLOCK_N)
                    _group(
                        y, y, h, of_slot, rows, mine, n, width, y_stride, b_stride, split_stride, 0, MAX_RANK,
                        SPLIT, ROWS, BLOCK_RANK, BLOCK_N, ADD_INPUTS, 0, 0, PDL,
                    )  # fmt: skip
    if FILL:
        rest = (place < num_rows) & ~written
        wait_for_former_kernel(PDL)  # what it reads may have had this memory
        if tl.max(rest.to(tl.int32), 0) > 0:
            # Rows that no group has stand behind those that one has, and the order does not list them.
            listed = rest & (place < rows_of_groups(counts, NUM_IDS, LANES))
            rows = tl.load(order + place, mask=listed, other=0)
            y_rows = y + (tl.where(listed, rows, place).to(tl.int64) * y_stride)[:, None]
            zeros = tl.zeros([ROWS, BLOCK_N], dtype=y.dtype.element_ty)
            for begin in range(0, COLUMNS, BLOCK_N):
                n = (column + begin + tl.arange(0, BLOCK_N))[None, :]
                tl.store(y_rows + n, zeros, mask=rest[:, None] & (n < width))
    wait_for_former_kernel(PDL)
