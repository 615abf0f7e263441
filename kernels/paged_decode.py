"""Attention of one new token a sequence over a paged cache, on the GPU.

The truth is kernels/reference/paged_decode.py. Nothing is planned on the host: a captured step reads its
lengths from the device.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching.checks import check, check_same_device
from kernels.tiles.device import has_dependent_launch, let_next_kernel_start, wait_for_former_kernel

HEAD_DIMS = (16, 32, 64, 128, 256)
# Query heads of a KV head that share its tile: the smallest height of a matrix instruction.
_ROWS = 16
# Programs that fill a card: 132 multiprocessors of an H100, four times.
_PROGRAMS = 528
_MOST_SPLITS = 16


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """block_kv: tokens a step of a program; splits: programs that share a sequence's tokens."""

    block_kv: int
    splits: int
    num_warps: int
    num_stages: int


@lru_cache(maxsize=1024)
def decode_config(sequences: int, kv_heads: int) -> DecodeConfig:
    """Measured on one H100 80GB HBM3 (triton 3.6, bfloat16, CUDA graphs) with 32 query and 8 KV heads of 128;
    us at (sequences, context)."""
    splits = _PROGRAMS // (sequences * kv_heads)
    splits = 1 << max(0, min(splits, _MOST_SPLITS).bit_length() - 1)
    if splits == 1:
        # 20.3 at (64, 192), 92.8 at (64, 1024), 116.9 at (256, 320); 2 stages 22.0, 100.6 and 118.0.
        return DecodeConfig(64, 1, 4, 1)
    if splits == 8:
        # 6.5 at (8, 192); 64 tokens in 2 stages 7.2.
        return DecodeConfig(32, splits, 4, 1)
    # 4.5 at (1, 192), 5.9 at (1, 1024), 8.5 at (16, 192), 13.2 at (32, 192); 1 stage 4.7, 5.8, 8.9 and 13.6;
    # 32 tokens 4.2 and 6.8 at 1.
    return DecodeConfig(64, splits, 4, 2)


@triton.jit
def _tokens(kv_indices, first_page, tokens, length, PAGE: tl.constexpr):
    """int64 KV slots of a sequence's tokens; whatever for those at and beyond `length`."""
    pages = tl.load(kv_indices + first_page + tokens // PAGE, mask=tokens < length, other=0)
    return pages.to(tl.int64) * PAGE + tokens % PAGE


@triton.jit
def paged_decode_kernel(
    out, partials, query, cache, kv_indices, kv_indptr, last_page_len, sinks, scale_log2,
    query_stride, plane_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_KV: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (KV head and split, sequence): the query heads of one KV head, over a share of the tokens."""
    let_next_kernel_start(PDL)
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(0) // KV_HEADS
    sequence = tl.program_id(1)
    first_page = tl.load(kv_indptr + sequence)
    pages = tl.load(kv_indptr + sequence + 1) - first_page
    length = (pages - 1) * PAGE + tl.load(last_page_len + sequence)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0)
    blocks = tl.cdiv(length - begin, BLOCK_KV)
    share = tl.cdiv(blocks, SPLITS) * BLOCK_KV
    begin += split * share
    end = tl.minimum(begin + share, length)

    d = tl.arange(0, HEAD_DIM)
    token = tl.arange(0, BLOCK_KV)
    row = tl.arange(0, ROWS)
    keys = cache + head * HEAD_DIM
    wait_for_former_kernel(PDL)
    own = (row < GROUP)[:, None]
    q = tl.load(
        query + sequence.to(tl.int64) * query_stride + (head * GROUP + row)[:, None] * HEAD_DIM + d[None, :],
        mask=own, other=0.0,
    )  # fmt: skip
    highest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    if SINKS:
        # A score without a value, of the first share alone.
        if split == 0:
            sink = tl.load(sinks + head * GROUP + row, mask=row < GROUP, other=0.0).to(tl.float32)
            highest = sink * 1.4426950408889634
            total += 1.0
    for start in range(begin, end, BLOCK_KV):
        tokens = start + token
        seen = tokens < end
        places = _tokens(kv_indices, first_page, tokens, end, PAGE) * (KV_HEADS * HEAD_DIM)
        k = tl.load(keys + places[:, None] + d[None, :], mask=seen[:, None], other=0.0)
        v = tl.load(keys + plane_stride + places[:, None] + d[None, :], mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        faded = tl.exp2(highest - higher)
        total = total * faded + tl.sum(weights, 1)
        acc = acc * faded[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        highest = higher
    if SPLITS == 1:
        places = out + (sequence.to(tl.int64) * KV_HEADS * GROUP + head * GROUP + row)[:, None] * HEAD_DIM
        tl.store(places + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=own)
    else:
        # [sequences, heads, SPLITS, HEAD_DIM + 2]: sums, highest score, total weight.
        place = (sequence.to(tl.int64) * KV_HEADS * GROUP + head * GROUP + row) * SPLITS + split
        base = partials + place * (HEAD_DIM + 2)
        tl.store(base[:, None] + d[None, :], acc, mask=own)
        tl.store(base + HEAD_DIM, highest, mask=row < GROUP)
        tl.store(base + HEAD_DIM + 1, total, mask=row < GROUP)


@triton.jit
def merge_kernel(out, partials, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr):
    """Program (sequence and head): shares without a token have weight 0 and are never the highest."""
    let_next_kernel_start(PDL)
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, HEAD_DIM)
    base = partials + (place * SPLITS + split) * (HEAD_DIM + 2)
    wait_for_former_kernel(PDL)
    highest = tl.load(base + HEAD_DIM)
    factor = tl.exp2(highest - tl.max(highest, 0))
    total = tl.sum(factor * tl.load(base + HEAD_DIM + 1), 0)
    sums = tl.load(base[:, None] + d[None, :])
    result = tl.sum(sums * factor[:, None], 0) / total
    tl.store(out + place * HEAD_DIM + d, result.to(out.dtype.element_ty))


def paged_decode(
    out: Tensor,
    query: Tensor,
    cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    last_page_len: Tensor,
    window: int | None = None,
    config: DecodeConfig | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Semantics: out[s, h] = softmax(query[s, h] . K_s[g] / sqrt(head_dim)) V_s[g].

    g = h * kv_heads // heads. K_s and V_s are the keys and values of sequence s in their order: those of the
    blocks kv_indices[kv_indptr[s] : kv_indptr[s + 1]], the last of which holds last_page_len[s] tokens.

    out            [sequences, heads, head_dim], contiguous, overwritten
    query          as out, but only its heads must be contiguous: rows of a wider tensor are served
    cache          [2, blocks, block_size, kv_heads, head_dim], keys then values; each of the two contiguous
    kv_indices     int32 [any], contiguous; int32 kv_indptr [sequences + 1] and last_page_len [sequences], at
                   least 1
    window         only the last so many tokens are seen; None: all
    config         block sizes. None: those for so many sequences
    sinks          floating [heads], contiguous: logits that take part in the softmax and bring no value

    Sums are float32, weights are rounded to the cache's dtype before they meet the values. On sm_90 the
    tables are read while the kernel before may still run (`let_next_kernel_start` says who must not write
    them). Raises KernelArgumentError.

    Serves up to 16 query heads a KV head, of 16 to 256 columns (a power of two).
    """
    check(query.dim() == 3, "query", f"must be [sequences, heads, head_dim], is {list(query.shape)}")
    sequences, heads, head_dim = query.shape
    check(cache.dim() == 5, "cache", f"must have five dimensions, has {cache.dim()}")
    kv_heads, page = cache.shape[3], cache.shape[2]
    config = config or decode_config(sequences, kv_heads)
    _check(out, query, cache, sinks)
    _check_tables(kv_indices, kv_indptr, last_page_len, sequences, query.device)
    if sequences == 0:
        return
    pdl = has_dependent_launch(query.device)
    partials = out
    if config.splits > 1:
        shape = (sequences, heads, config.splits, head_dim + 2)
        partials = torch.empty(shape, dtype=torch.float32, device=out.device)
    paged_decode_kernel[(kv_heads * config.splits, sequences)](
        out=out, partials=partials, query=query, cache=cache, kv_indices=kv_indices, kv_indptr=kv_indptr,
        last_page_len=last_page_len, sinks=out if sinks is None else sinks,
        scale_log2=math.log2(math.e) / math.sqrt(head_dim),
        query_stride=query.stride(0), plane_stride=cache.stride(0), KV_HEADS=kv_heads,
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, PAGE=page, BLOCK_KV=config.block_kv,
        SPLITS=config.splits, WINDOW=window or 0, SINKS=sinks is not None, ROWS=_ROWS, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip
    if config.splits > 1:
        merge_kernel[(sequences * heads,)](
            out=out, partials=partials, HEAD_DIM=head_dim, SPLITS=config.splits, PDL=pdl, num_warps=2,
            launch_pdl=pdl,
        )  # fmt: skip


def serves(heads: int, kv_heads: int, head_dim: int) -> bool:
    return head_dim in HEAD_DIMS and heads % kv_heads == 0 and heads // kv_heads <= _ROWS


def _check(out: Tensor, query: Tensor, cache: Tensor, sinks: Tensor | None) -> None:
    _, heads, head_dim = query.shape
    kv_heads = cache.shape[3]
    served = serves(heads, kv_heads, head_dim)
    check(
        served, "query", f"has {heads} heads of {head_dim} over {kv_heads}, which the kernel does not serve"
    )
    inner = query.stride(2) == 1 and query.stride(1) == head_dim
    check(inner, "query", f"must have contiguous heads, has strides {query.stride()}")
    check(out.shape == query.shape and out.is_contiguous(), "out", "must be contiguous and as query")
    check(out.dtype == query.dtype, "out", f"is {out.dtype}, query {query.dtype}")
    whole = cache.shape[0] == 2 and cache.shape[4] == head_dim and cache[0].is_contiguous()
    check(whole, "cache", f"must be [2, blocks, block_size, kv_heads, {head_dim}], is {list(cache.shape)}")
    check(cache.dtype == query.dtype, "cache", f"is {cache.dtype}, query {query.dtype}")
    check_same_device(query.device, out=out, cache=cache)
    if sinks is not None:
        fits = sinks.shape == (heads,) and sinks.is_contiguous() and sinks.is_floating_point()
        check(fits, "sinks", f"must be contiguous and floating, one for each of {heads} heads")
        check_same_device(query.device, sinks=sinks)


def _check_tables(
    kv_indices: Tensor, kv_indptr: Tensor, last_page_len: Tensor, sequences: int, device: torch.device
) -> None:
    tables = {"kv_indices": kv_indices, "kv_indptr": kv_indptr, "last_page_len": last_page_len}
    for argument, table in tables.items():
        plain = table.dtype == torch.int32 and table.dim() == 1 and table.is_contiguous()
        check(plain, argument, f"must be contiguous int32 of one dimension, is {table.dtype}")
    for argument, expected in (("kv_indptr", sequences + 1), ("last_page_len", sequences)):
        entries = len(tables[argument])
        check(entries == expected, argument, f"has {entries} entries for {sequences} sequences")
    check_same_device(device, **tables)
