"""Attention in plain torch, where FlashInfer is missing or does not serve the model, as in float32."""

from collections.abc import Iterable

import torch
from torch import Tensor

from executor.gpu.attention.planner import Kind
from executor.layers.attention import AttentionPlan, Span, grouped
from executor.step.buffers import StepBuffers, StepShape


class TorchAttention:
    """A StepPlanner for layers of these windows."""

    def __init__(self, windows: Iterable[int | None]) -> None:
        self._windows = frozenset(windows)

    def plan(
        self, shape: StepShape, buffers: StepBuffers, kv_slots: Tensor, block_size: int, kind: Kind
    ) -> AttentionPlan:
        offsets = torch.arange(block_size, device=kv_slots.device)
        slots = (buffers.kv_indices[: int(shape.kv_indptr[-1]), None].long() * block_size + offsets).flatten()
        rows, pages = shape.qo_indptr.tolist(), shape.kv_indptr.tolist()
        spans = []
        for number, kv_len in enumerate(shape.kv_lens.tolist()):
            query_len, first = rows[number + 1] - rows[number], pages[number] * block_size
            spans.append(Span(rows[number], kv_len - query_len, query_len, slots[first : first + kv_len]))
        return grouped(spans, kv_slots, self._windows)
