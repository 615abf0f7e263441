"""Attention planned from a step's buffers is attention planned from its sequences."""

import pytest
import torch

from executor.gpu.attention.plain import TorchAttention
from executor.layers.attention import KVCache, LayerCache, Span, plan_attention
from executor.step.buffers import StepBuffers
from executor.step.inputs import SequenceRows

BLOCK, BLOCKS, HEADS, KV_HEADS, HEAD_DIM = 4, 30, 4, 2, 8


@pytest.mark.parametrize("window", [None, 5])
def test_it_is_the_plan_of_the_sequences(window: int | None) -> None:
    torch.manual_seed(0)
    data = torch.randn(2, BLOCKS, BLOCK, KV_HEADS, HEAD_DIM)
    cache = KVCache((LayerCache(data, window),), BLOCKS, BLOCK)
    free = torch.randperm(BLOCKS).tolist()
    given = [(5, 0), (1, 12), (3, 6), (1, 0), (2, 15)]  # tokens, and those before them
    tables = [[free.pop() for _ in range(5)] for _ in given]
    sequences = [
        SequenceRows([0] * count, start, table, -1, ())
        for (count, start), table in zip(given, tables, strict=True)
    ]
    buffers = StepBuffers(32, 8, 60, cache)
    shape = buffers.fill(sequences, rows=16)
    rows = sum(count for count, _ in given)
    query = torch.randn(16, HEADS, HEAD_DIM)

    step = TorchAttention([window]).plan(shape, buffers, buffers.kv_slots[:16], BLOCK, "rows")
    out = torch.full_like(query, torch.nan)
    step.attend_into(out, query, cache.layers[0])

    spans, first = [], 0
    for (count, start), table in zip(given, tables, strict=True):
        slots = (torch.tensor(table)[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
        spans.append(Span(first, start, count, slots[: start + count]))
        first += count
    expected = plan_attention(spans, cache)
    assert torch.equal(out[:rows], expected.attend(query[:rows], cache.layers[0]))
    assert out[rows:].isnan().all(), "rows of no sequence are left alone"
    assert torch.equal(step.kv_slots[:rows], expected.kv_slots)
