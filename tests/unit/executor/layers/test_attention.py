import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.layers.attention import AttentionPlan, KVCache, LayerCache, Span, plan_attention

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
POISON = float("nan")


def make_cache(num_blocks: int, block_size: int, windows: tuple[int | None, ...]) -> KVCache:
    shape = (2, num_blocks, block_size, KV_HEADS, HEAD_DIM)
    layers = tuple(LayerCache(torch.full(shape, POISON), window) for window in windows)
    return KVCache(layers, num_blocks, block_size)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, plan: AttentionPlan
) -> torch.Tensor:
    """As a step does it: keys and values into the cache, then the layer's attention."""
    for stored, new in zip(cache.data.flatten(1, 2), (key, value), strict=True):
        stored[plan.kv_slots] = new
    return plan.attend(query, cache)


def slots(block_ids: list[int], block_size: int, length: int) -> torch.Tensor:
    return torch.tensor([block_ids[i // block_size] * block_size + i % block_size for i in range(length)])


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None) -> torch.Tensor:
    """By the definition, one query at a time. q [queries, heads, dim]; k, v [positions, kv_heads, dim]."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1).double() for x in (k, v))
    rows = []
    for i, query in enumerate(q.double()):
        low, high = 0 if window is None else max(0, start + i + 1 - window), start + i + 1
        weights = torch.softmax(torch.einsum("hd,phd->hp", query, k[low:high]) / math.sqrt(HEAD_DIM), -1)
        rows.append(torch.einsum("hp,phd->hd", weights, v[low:high]))
    return torch.stack(rows).float()


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=6),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([None, 1, 5, 100]),
    st.integers(0, 2**31),
)
def test_attend_equals_the_definition(
    shapes: list[tuple[int, int]], block_size: int, window: int | None, seed: int
) -> None:
    """Sequences (start, query_len) share one step and a shuffled pool; what was never written is NaN."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [start + count for start, count in shapes]
    needed = [-(-length // block_size) for length in lengths]
    pool = torch.randperm(sum(needed), generator=generator).tolist()
    tables = [[pool.pop() for _ in range(count)] for count in needed]
    cache = make_cache(sum(needed), block_size, (window,))
    spans, queries, keys, values = [], [], [], []
    for (start, count), length, table in zip(shapes, lengths, tables, strict=True):
        where = slots(table, block_size, length)
        kv = torch.randn(2, length, KV_HEADS, HEAD_DIM, generator=generator)
        cache.layers[0].data.flatten(1, 2)[:, where[:start]] = kv[:, :start]
        spans.append(Span(sum(len(q) for q in queries), start, count, where))
        queries.append(torch.randn(count, HEADS, HEAD_DIM, generator=generator))
        keys.append(kv[0])
        values.append(kv[1])
    new_keys, new_values = (
        torch.cat([x[start:] for x, (start, _) in zip(xs, shapes, strict=True)]) for xs in (keys, values)
    )
    out = attend(torch.cat(queries), new_keys, new_values, cache.layers[0], plan_attention(spans, cache))
    expected = [
        dense(q, k, v, start, window)
        for q, k, v, (start, _) in zip(queries, keys, values, shapes, strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 4])
def test_a_poisoned_neighbour_stays_alone(window: int | None) -> None:
    """Its NaN keys and values sit in the same step, the same padded call and in block 0."""
    cache = make_cache(8, 4, (window,))
    long, short = slots([0, 1, 2], 4, 9), slots([5], 4, 3)
    for where in (long, short):
        cache.layers[0].data.flatten(1, 2)[:, where] = 1.0
    spans = [Span(0, 8, 1, long), Span(1, 2, 1, short)]
    plan = plan_attention(spans, cache)
    assert len(plan.groups[window]) == 1
    key = torch.ones(2, KV_HEADS, HEAD_DIM)
    query = torch.ones(2, HEADS, HEAD_DIM)
    cache.layers[0].data[:, :3] = POISON
    out = attend(query, key, key, cache.layers[0], plan)
    assert out[0].isnan().all()
    assert torch.equal(out[1], torch.ones(HEADS, HEAD_DIM))


def test_decodes_share_a_call_until_lengths_are_far_apart() -> None:
    cache = make_cache(4, 1024, (None,))
    lengths = [1, 30, 200, 1000, 1020, 30]
    spans = [Span(i, length - 1, 1, torch.arange(length)) for i, length in enumerate(lengths)]
    spans[5] = replace(spans[5], start=28, query_len=2)
    (groups,) = plan_attention(spans, cache).groups.values()
    assert [sorted(group.rows.tolist()) for group in groups] == [[0, 1, 2], [3, 4], [5, 6]]


def test_a_window_reads_only_what_it_sees() -> None:
    cache = make_cache(4, 1024, (None, 16))
    plan = plan_attention([Span(0, 999, 1, torch.arange(1000))], cache)
    assert plan.groups[16][0].kv_slots.tolist() == list(range(984, 1000))
    assert len(plan.groups[None][0].kv_slots) == 1000


def test_an_empty_step_changes_nothing() -> None:
    cache = make_cache(1, 4, (None,))
    cache.layers[0].data.fill_(2.0)
    empty = torch.empty(0, KV_HEADS, HEAD_DIM)
    out = attend(torch.empty(0, HEADS, HEAD_DIM), empty, empty, cache.layers[0], plan_attention([], cache))
    assert out.shape == (0, HEADS, HEAD_DIM)
    assert (cache.layers[0].data == 2.0).all()
