"""The qkv layer's expand inside the rotation of q and k, and the write of k and v into a paged cache.

The truth is kernels/reference/lora_expand_rope.py.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from kernels.launching.checks import check, check_hidden_block, check_rows
from kernels.launching.follower import (
    Entries,
    PagedCache,
    check_follower,
    check_like,
    check_rope,
    check_rotation,
    check_rows_contiguous,
)
from kernels.launching.follower_tuning import PLAIN, FollowerConfig, rope_config
from kernels.launching.launch import Launch, row_signature, signature
from kernels.metadata.meta import LoRAKernelMeta
from kernels.tiles.block_tile import rows_by, valid_by
from kernels.tiles.device import has_dependent_launch, let_next_kernel_start, of_slice, wait_for_former_kernel
from kernels.tiles.expand_tile import delta, load_b, load_entry, load_h, load_rank, rows_at

# What the kernel serves: halves of a head must be a tile.
HEAD_DIMS = (16, 32, 64, 128, 256)


@triton.jit
def _store_rows(
    y, cache, kv_slots, rows, count, s, n, width, column, first_half, second_half, valid, y_stride,
    plane_stride,
    K_WIDTH: tl.constexpr, HALF: tl.constexpr, HAS_CACHE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """q goes to y; k and v to their plane of the cache if there is one, else to y."""
    if HAS_CACHE and s > 0:
        if ROWS == 1:
            kv_slot = tl.load(kv_slots + rows)
            written = n < tl.where(kv_slot >= 0, width, 0)
        else:
            kv_slot = tl.load(kv_slots + rows, mask=tl.arange(0, ROWS) < count, other=-1)
            written = valid & (kv_slot >= 0)[:, None]
        places = cache + (s - 1) * plane_stride + rows_by(kv_slot, n, K_WIDTH, ROWS)
        tl.store(places, first_half, mask=written)
        tl.store(places + HALF, second_half, mask=written)
    else:
        places = y + rows_by(rows, column + n, y_stride, ROWS)
        tl.store(places, first_half, mask=valid)
        tl.store(places + HALF, second_half, mask=valid)


@triton.jit
def _rows_rope(
    y, h, b, b_first, b_second, cos, sin, cache, kv_slots, order, start, count, s, n, lane, column, rank,
    width, num_rows, y_stride, b_stride, angle_stride, plane_stride,
    K_WIDTH: tl.constexpr, SPLIT: tl.constexpr, MAX_RANK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr, HAS_CACHE: tl.constexpr,
    HAS_LORA: tl.constexpr,
):  # fmt: skip
    rows = rows_at(order, start, count, ROWS, HAS_LORA)
    valid = valid_by(count, n < width, ROWS)
    turned = valid_by(count, n < tl.where(s < 2, width, 0), ROWS)
    places = y + rows_by(rows, column + n, y_stride, ROWS)
    if HAS_LORA:
        r = tl.arange(0, BLOCK_RANK)
        h_tile = load_h(h, s, start, count, r, rank, num_rows, 3, SPLIT, MAX_RANK, ROWS)
    first = tl.load(places, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=valid, other=0.0).to(tl.float32)
    angle = rows_by(rows, lane, angle_stride, ROWS)
    c = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
    d = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
    if HAS_LORA:
        first += delta(
            h_tile, b_first, h, b, b_stride, s, start, count, n, rank, width, num_rows, 3, SPLIT, MAX_RANK,
            ROWS, BLOCK_RANK, COLUMNS,
        )  # fmt: skip
        second += delta(
            h_tile, b_second, h, b, b_stride, s, start, count, n + HALF, rank, width, num_rows, 3, SPLIT,
            MAX_RANK, ROWS, BLOCK_RANK, COLUMNS,
        )  # fmt: skip
    element = y.dtype.element_ty
    _store_rows(
        y, cache, kv_slots, rows, count, s, n, width, column, (first * c - second * d).to(element),
        (second * c + first * d).to(element), valid, y_stride, plane_stride, K_WIDTH, HALF, HAS_CACHE, ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "listed"])
def expand_rope_kernel(
    y, h, b0, b1, b2, ranks, cos, sin, cache, kv_slots, work, order, starts,
    num_rows, listed, y_stride, slot_stride, b_stride0, b_stride1, b_stride2, angle_stride, plane_stride,
    Q_WIDTH: tl.constexpr, K_WIDTH: tl.constexpr, HALF: tl.constexpr, MAX_LORAS: tl.constexpr,
    MAX_RANK: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr, COLUMNS: tl.constexpr, HAS_CACHE: tl.constexpr, HAS_LORA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (some heads, entry): COLUMNS pairs of columns (i, i + HALF), which turn together."""
    let_next_kernel_start(PDL)
    tile = tl.program_id(0)
    slot, start, count = load_entry(
        work, tl.program_id(1), listed, starts, num_rows, MAX_LORAS, ROWS, HAS_LORA
    )
    if count == 0:
        wait_for_former_kernel(PDL)
        return

    Q_TILES: tl.constexpr = (Q_WIDTH + 2 * COLUMNS - 1) // (2 * COLUMNS)
    K_TILES: tl.constexpr = (K_WIDTH + 2 * COLUMNS - 1) // (2 * COLUMNS)
    s = (tile >= Q_TILES).to(tl.int32) + (tile >= Q_TILES + K_TILES).to(tl.int32)
    pair = tl.arange(0, COLUMNS)
    lane = pair % HALF
    first_tile = of_slice(s, 0, Q_TILES, Q_TILES + K_TILES, 3)
    n = (tile - first_tile) * 2 * COLUMNS + (pair // HALF) * 2 * HALF + lane
    width = tl.where(s == 0, Q_WIDTH, K_WIDTH)
    column = of_slice(s, 0, Q_WIDTH, Q_WIDTH + K_WIDTH, 3)
    rank, b_stride, b_first, b_second = 0, 0, 0, 0
    b = b0
    if HAS_LORA:
        rank = load_rank(ranks, s, slot, MAX_LORAS, MAX_RANK)
        b = of_slice(s, b0, b1, b2, 3) + slot.to(tl.int64) * slot_stride
        b_stride = of_slice(s, b_stride0, b_stride1, b_stride2, 3)
        b_first = load_b(b, b_stride, tl.arange(0, BLOCK_RANK), n, rank, width)
        b_second = load_b(b, b_stride, tl.arange(0, BLOCK_RANK), n + HALF, rank, width)
    wait_for_former_kernel(PDL)
    _rows_rope(
        y, h, b, b_first, b_second, cos, sin, cache, kv_slots, order, start, count, s, n, lane, column, rank,
        width, num_rows, y_stride, b_stride, angle_stride, plane_stride, K_WIDTH, SPLIT, MAX_RANK, ROWS,
        BLOCK_RANK, COLUMNS, HALF, HAS_CACHE, HAS_LORA,
    )  # fmt: skip


def lora_expand_rope(
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    ranks: Tensor,
    cos: Tensor,
    sin: Tensor,
    meta: LoRAKernelMeta,
    cache: PagedCache | None = None,
    config: FollowerConfig | None = None,
) -> None:
    """Semantics: z = y[row(p)] + [h[s, p, :r] @ B_s[slot, :r] for s]; q and k of z are turned; y[row(p)] = z.

    p is a place of the sorted order, row(p) = token_indices_sorted_by_lora_ids[p], slot that row's slot,
    r = ranks[s, slot]; the delta is 0 for base rows. The columns (i, i + m) of every head of q and k, m being
    half the head, turn from (a, b) to (a cos_i - b sin_i, b cos_i + a sin_i).

    y         floating [rows, q + k + v columns], contiguous rows: the base layer's output, changed in place
    h         float32 [3, rows, max_rank] or [splits, 3, rows, max_rank], whose sum counts; from lora_shrink
    lora_b    q's, k's and v's rank-major B, [max_loras, max_rank, out_s], of one arena; a row >= r is never
              read
    ranks     int32 [3, max_loras], contiguous; 0: the slot has no such module
    cos, sin  floating [rows, head_dim / 2], contiguous rows, of one stride: each row's own position
    cache     k and v go there, at their kv_slots, and y's columns of k and v keep the base's output
    config    block sizes. None: the tuned ones for this step

    All in float32, rounded once. On sm_90 weights, ranks and metadata are read while the kernel before may
    still run (`let_next_kernel_start` says who must not write them). Raises KernelArgumentError.

    Serves heads of 16, 32, 64, 128 or 256 columns, and a bias where the base layer adds it to y. Norms of q
    and k, slots for only some of the three and DoRA's output scale take lora_expand, what comes between, and
    rope. High ranks that the plan cuts into parts are right here but slow.
    """
    head_dim = 2 * cos.shape[-1]
    config = config or rope_config(meta.plan, head_dim)
    splits = h.shape[0] if h.dim() == 4 else 1
    written = () if cache is None else (signature(cache.data), row_signature(cache.kv_slots))
    row_tensors = (row_signature(y), row_signature(cos), row_signature(sin), written)
    form = ("rope", config, splits, row_tensors, signature(*lora_b, ranks))
    launch = meta.launches.get(form)
    if launch is None:
        check_rope(y, h, lora_b, ranks, cos, sin, meta)
        check_follower(lora_b, ranks=ranks, y=y, cos=cos, sin=sin)
        check_rotation(y, cos, sin, cache, lora_b[1].shape[2])
        launch = _launch(config, splits, lora_b[0], lora_b[1], head_dim, meta.max_loras, cache is not None)
        meta.launches[form] = launch
    for argument, tensor in (("y", y), ("cos", cos), ("sin", sin)):
        check_rows(tensor, argument, meta)
    q, k, v = lora_b
    check_hidden_block(h, q, 3, meta)
    data, kv_slots = (cache.data, cache.kv_slots) if cache else (y, y)
    check_rows(kv_slots, "cache.kv_slots", meta)
    if meta.plan.items == 0:
        rope(y, cos, sin, k.shape[2], cache)
        return
    entries = Entries.of(meta, config.rows)
    launch(
        (_head_tiles(q.shape[2], k.shape[2], config.block_n), entries.total), y, h, q, k, v, ranks, cos, sin,
        data, kv_slots, entries.work, meta.token_indices_sorted_by_lora_ids, meta.lora_token_start_loc,
        meta.num_rows, entries.listed, y.stride(0), q.stride(0), q.stride(1), k.stride(1), v.stride(1),
        cos.stride(0), data.stride(0),
    )  # fmt: skip


def _launch(
    config: FollowerConfig, splits: int, q: Tensor, k: Tensor, head_dim: int, max_loras: int, has_cache: bool
) -> Launch:
    pdl = has_dependent_launch(q.device)
    constants = {
        "Q_WIDTH": q.shape[2], "K_WIDTH": k.shape[2], "HALF": head_dim // 2, "MAX_LORAS": max_loras,
        "MAX_RANK": q.shape[1], "SPLIT": splits, "ROWS": config.rows,
        "BLOCK_RANK": config.block_rank, "COLUMNS": config.block_n // 2, "HAS_CACHE": has_cache,
        "HAS_LORA": True, "PDL": pdl,
    }  # fmt: skip
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": pdl}
    return Launch(expand_rope_kernel, constants, options)


def rope(y: Tensor, cos: Tensor, sin: Tensor, k_width: int, cache: PagedCache | None = None) -> None:
    """The same without LoRA: the last `k_width` columns of y are v, those before k, the others q."""
    (rows, columns), head_dim = y.shape, 2 * cos.shape[1]
    check_rows_contiguous(y=y, cos=cos, sin=sin)
    check_like(sin, "sin", cos, "cos")
    check(len(cos) == rows and columns > 2 * k_width, "cos", f"must have the {rows} rows of y")
    check_rotation(y, cos, sin, cache, k_width)
    if rows == 0:
        return
    block_n = max(PLAIN.block_n, head_dim)
    data, kv_slots = (cache.data, cache.kv_slots) if cache else (y, y)
    q_width = columns - 2 * k_width
    pdl = has_dependent_launch(y.device)
    expand_rope_kernel[(_head_tiles(q_width, k_width, block_n), rows)](
        y=y, h=y, b0=y, b1=y, b2=y, ranks=y, cos=cos, sin=sin, cache=data, kv_slots=kv_slots, work=y, order=y,
        starts=y, num_rows=rows, listed=0, y_stride=y.stride(0), slot_stride=0, b_stride0=0, b_stride1=0,
        b_stride2=0, angle_stride=cos.stride(0), plane_stride=data.stride(0), Q_WIDTH=q_width,
        K_WIDTH=k_width, HALF=head_dim // 2, MAX_LORAS=0, MAX_RANK=0, SPLIT=0, ROWS=PLAIN.rows,
        BLOCK_RANK=0, COLUMNS=block_n // 2, HAS_CACHE=cache is not None, HAS_LORA=False,
        PDL=pdl, num_warps=PLAIN.num_warps, launch_pdl=pdl,
    )  # fmt: skip


def _head_tiles(q_width: int, k_width: int, block_n: int) -> int:
    return -(-q_width // block_n) + 2 * -(-k_width // block_n)
