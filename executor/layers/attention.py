"""Attention over a paged KV cache, in plain torch: the cache, and a step's plan of attention.

A plan is made once a step, and its `attend` runs in every layer. executor/gpu/attention/flashinfer.py has
another implementation of `StepAttention`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.distributed import SINGLE, ParallelGroup
from executor.layers.linear import kv_head_share
from executor.layers.model_config import ModelConfig

# Up to this KV length sequences share one padded call whatever their lengths; beyond it, those whose lengths
# have the same number of bits.
_ALWAYS_SHARED = 256


@dataclass(frozen=True, slots=True)
class LayerCache:
    data: Tensor  # [2 (keys, values), num_blocks, block_size, kv_heads, head_dim]
    window: int | None  # a token sees itself and the window - 1 tokens before it; None: all before it
    soft_cap: float | None = None  # of scores: they become soft_cap * tanh(score / soft_cap)


@dataclass(frozen=True, slots=True)
class KVCache:
    """All layers' keys and values. Token t of a sequence lives in block block_ids[t // block_size] at offset
    t % block_size, in every layer; the flat number block * block_size + offset is its KV slot.

    On a GPU there is one spare block more, number `num_blocks`: rows that only fill up a captured step, and
    steps before the first real one, look at it.
    """

    layers: tuple[LayerCache, ...]
    num_blocks: int
    block_size: int

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        block_size: int,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        group: ParallelGroup = SINGLE,
    ) -> Self:
        """For this rank's KV heads."""
        kv_heads = len(kv_head_share(config.num_kv_heads, group))
        spare = int(torch.device(device).type == "cuda")
        shape = (2, num_blocks + spare, block_size, kv_heads, config.head_dim)
        layers = tuple(
            LayerCache(torch.zeros(shape, dtype=dtype, device=device), window, config.soft_caps.scores)
            for window in config.windows
        )
        return cls(layers, num_blocks, block_size)

    @property
    def device(self) -> torch.device:
        return self.layers[0].data.device

    @property
    def spare_blocks(self) -> int:
        return self.layers[0].data.shape[1] - self.num_blocks

    @property
    def nbytes(self) -> int:
        return sum(layer.data.nbytes for layer in self.layers)


class StepAttention(Protocol):
    """One step's attention, for all layers. `kv_slots` int64 [rows]: where each row's key and value are
    written, which the projection's follower does before `attend`."""

    @property
    def kv_slots(self) -> Tensor: ...

    def attend(self, query: Tensor, cache: LayerCache, sinks: Tensor | None = None) -> Tensor:
        """out[row] = softmax(q k^T / sqrt(head_dim)) v over the positions of the row's own sequence that are
        visible to it. query [rows, heads, head_dim], contiguous heads; returns its shape, contiguous.
        `sinks` [heads] are logits that take part in the softmax without a value; with the layer's `soft_cap`
        the softmax is of capped scores."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's share of a step: rows [first_row, first_row + query_len) hold its positions
    [start, start + query_len), and `kv_slots` [start + query_len] says where each of its positions lives."""

    first_row: int
    start: int
    query_len: int
    kv_slots: Tensor


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with equal query length, in one call. Shorter ones are padded with their own first visible
    slot: masked away, but never a stranger's (a NaN there would come through the mask)."""

    rows: Tensor  # [sequences * query_len] rows of the step
    kv_slots: Tensor  # [sequences * padded KV length]
    mask: Tensor  # [sequences, 1, query_len, padded KV length] bool, True where a query sees a key


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    kv_slots: Tensor  # [rows] int64: where each row's key and value are written
    groups: dict[int | None, tuple[_Group, ...]]  # by window

    def attend(self, query: Tensor, cache: LayerCache, sinks: Tensor | None = None) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        self.attend_into(out, query, cache, sinks)
        return out

    def attend_into(self, out: Tensor, query: Tensor, cache: LayerCache, sinks: Tensor | None = None) -> None:
        """Rows that belong to no sequence are left alone."""
        stored = cache.data.flatten(1, 2)  # [2, KV slots, kv_heads, head_dim], a view
        for group in self.groups[cache.window]:
            sequences, _, query_len, kv_len = group.mask.shape
            q = query[group.rows].view(sequences, query_len, *query.shape[1:]).transpose(1, 2)
            seen = stored.index_select(1, group.kv_slots).view(2, sequences, kv_len, *stored.shape[2:])
            k, v = seen.transpose(2, 3)
            mask = group.mask
            if sinks is not None:
                k, v, mask = _with_sinks(k, v, mask, sinks)
            if cache.soft_cap is None:
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            else:
                y = _capped_attention(q, k, v, mask, cache.soft_cap)
            out[group.rows] = y.transpose(1, 2).flatten(0, 1)


def plan_attention(spans: Sequence[Span], cache: KVCache) -> AttentionPlan:
    """One plan for all layers of a step; layers with different windows have different groups."""
    written = [span.kv_slots[span.start :] for span in spans]
    kv_slots = torch.cat(written) if written else torch.empty(0, dtype=torch.int64, device=cache.device)
    return grouped(spans, kv_slots, {layer.window for layer in cache.layers})


def grouped(spans: Sequence[Span], kv_slots: Tensor, windows: Iterable[int | None]) -> AttentionPlan:
    return AttentionPlan(kv_slots, {window: _group(spans, window, kv_slots.device) for window in windows})


def _capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, soft_cap: float) -> Tensor:
    """As torch's, of capped scores. q [sequences, heads, queries, head_dim]; k, v with KV heads."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    scores = torch.tanh(scores / soft_cap) * soft_cap
    weights = scores.masked_fill_(~mask, -torch.inf).softmax(-1, dtype=torch.float32)
    return weights.to(v.dtype) @ v


def _with_sinks(k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A key of zeros more, whose score is what the mask adds, the sink, with a value of zeros."""
    scores = torch.zeros(mask.shape, dtype=k.dtype, device=k.device).masked_fill_(~mask, -torch.inf)
    scores = scores.expand(-1, len(sinks), -1, -1)
    column = sinks.to(k.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    return F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), torch.cat((scores, column), dim=-1)


def _group(spans: Sequence[Span], window: int | None, device: torch.device) -> tuple[_Group, ...]:
    def key(span: Span) -> tuple[int, int]:
        return span.query_len, max(_ALWAYS_SHARED, len(span.kv_slots)).bit_length()

    members = (list(group) for _, group in groupby(sorted(spans, key=key), key))
    return tuple(_make_group(group, window, device) for group in members)


def _make_group(spans: Sequence[Span], window: int | None, device: torch.device) -> _Group:
    query_len = spans[0].query_len
    first = [0 if window is None else max(0, span.start - window + 1) for span in spans]
    kv_len = max(len(span.kv_slots) - low for span, low in zip(spans, first, strict=True))
    slots = torch.cat([_padded(span.kv_slots[low:], kv_len) for span, low in zip(spans, first, strict=True)])
    steps = torch.arange(query_len, device=device)
    rows = torch.cat([span.first_row + steps for span in spans])
    # Key column c of a sequence holds position first + c; query j stands at position start + j.
    offset = torch.tensor([span.start - low for span, low in zip(spans, first, strict=True)], device=device)
    distance = (offset[:, None] + steps)[:, :, None] - torch.arange(kv_len, device=device)
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    return _Group(rows, slots, mask[:, None])


def _padded(slots: Tensor, length: int) -> Tensor:
    return torch.cat((slots, slots[:1].expand(length - len(slots))))
