from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from executor.layers.attention import KVCache, LayerCache, Span, plan_attention
from kernels import paged_decode as triton_form
from kernels.errors import KernelArgumentError
from kernels.paged_decode import DecodeConfig, decode_config
from kernels.reference.paged_decode import paged_decode
from tests.kernels.stack import DEVICE

PAGE, KV_HEADS, HEAD_DIM = 4, 2, 32
LENGTHS = [1, 4, 5, 23, 64, 65, 130]


def inputs(
    lengths: list[int], group: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(query, cache, kv_indices, kv_indptr, last_page_len): shuffled blocks; what no sequence has is NaN."""
    torch.manual_seed(0)
    pages = [-(-length // PAGE) for length in lengths]
    blocks = torch.randperm(sum(pages) + 3)[: sum(pages)]
    cache = torch.full((2, sum(pages) + 3, PAGE, KV_HEADS, HEAD_DIM), float("nan"))
    ends = [0, *torch.tensor(pages).cumsum(0).tolist()]
    for length, start, end in zip(lengths, ends, ends[1:], strict=False):
        slots = (blocks[start:end, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        cache.flatten(1, 2)[:, slots] = torch.randn(2, length, KV_HEADS, HEAD_DIM)
    wide = torch.randn(len(lengths), (group + 2) * KV_HEADS, HEAD_DIM)
    tables = (blocks, torch.tensor(ends), torch.tensor([(length - 1) % PAGE + 1 for length in lengths]))
    query = wide.to(device, dtype)[:, : group * KV_HEADS]
    return query, cache.to(device, dtype), *(table.int().to(device) for table in tables)


@pytest.mark.parametrize("window", [None, 7, 64])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("group", "sinks"), [(1, False), (3, False), (3, True), (16, True)])
def test_it_equals_the_reference(group: int, sinks: bool, splits: int, window: int | None) -> None:
    query, *rest = inputs(LENGTHS, group, DEVICE)
    expected, actual = (torch.full(query.shape, float("nan"), device=DEVICE) for _ in range(2))
    weights = torch.linspace(-2, 3, group * KV_HEADS, device=DEVICE) if sinks else None
    paged_decode(expected, query, *rest, window, weights)
    triton_form.paged_decode(actual, query, *rest, window, DecodeConfig(16, splits, 4, 2), weights)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_sinks_are_those_of_the_layers() -> None:
    """The plan's own attention is the definition that models are compared with."""
    query, cache, indices, indptr, last = inputs(LENGTHS, 3)
    sinks = torch.linspace(-2, 3, 3 * KV_HEADS)
    expected = torch.full(query.shape, float("nan"))
    paged_decode(expected, query, cache, indices, indptr, last, 7, sinks)
    spans = []
    for number, length in enumerate(LENGTHS):
        pages = indices[indptr[number] : indptr[number + 1]].long()
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        spans.append(Span(number, length - 1, 1, slots))
    layer = LayerCache(cache, 7)
    plan = plan_attention(spans, KVCache((layer,), cache.shape[1], PAGE))
    torch.testing.assert_close(plan.attend(query, layer, sinks), expected, rtol=1e-4, atol=1e-5)


def test_few_sequences_are_cut_into_more_programs() -> None:
    splits = [decode_config(sequences, 8).splits for sequences in (1, 4, 8, 16, 33, 64, 256)]
    assert splits == sorted(splits, reverse=True)
    assert (splits[0], splits[-1]) == (16, 1)


def test_what_the_kernel_does_not_serve_is_refused() -> None:
    query, cache, *tables = inputs([3, 5], 2)
    with pytest.raises(KernelArgumentError, match="query has 4 heads"):
        triton_form.paged_decode(torch.empty(2, 4, 31), query[..., :31], cache, *tables)
    with pytest.raises(KernelArgumentError, match="kv_indptr has 3 entries for 1"):
        triton_form.paged_decode(query[:1].clone(), query[:1], cache, *tables)
    with pytest.raises(KernelArgumentError, match="out must be contiguous"):
        triton_form.paged_decode(query, query, cache, *tables)


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("query", lambda query: query[0]),
        ("out", lambda out: out.half()),
        ("cache", lambda cache: cache.half()),
        ("cache", lambda cache: cache[0]),
        ("cache", lambda cache: cache.to("meta")),
        ("kv_indices", lambda table: table.long()),
        ("kv_indices", lambda table: table.repeat_interleave(2)[::2]),
        ("kv_indptr", lambda table: table.float()),
        ("last_page_len", lambda table: table[1:]),
        ("last_page_len", lambda table: table.to("meta")),
        ("sinks", lambda sinks: sinks[1:]),
        ("sinks", lambda sinks: sinks.int()),
    ],
)
def test_every_argument_is_checked_by_name(argument: str, wrong: Callable[[Tensor], Tensor]) -> None:
    names = ("query", "cache", "kv_indices", "kv_indptr", "last_page_len")
    given = dict(zip(names, inputs([3, 5], 2, DEVICE), strict=True))
    out = torch.empty(given["query"].shape, device=DEVICE)
    given |= {"out": out, "sinks": torch.zeros(2 * KV_HEADS, device=DEVICE)}
    triton_form.paged_decode(**given)
    with pytest.raises(KernelArgumentError) as caught:
        triton_form.paged_decode(**{**given, argument: wrong(given[argument])})
    assert caught.value.argument == argument


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sequences", [1, 9, 64])
@pytest.mark.parametrize("sinked", [False, True])
def test_on_a_gpu_eagerly_and_replayed_with_other_lengths(
    sequences: int, sinked: bool, dtype: torch.dtype
) -> None:
    lengths = [1 + 37 * i % 200 for i in range(sequences)]
    query, cache, indices, indptr, last = inputs(lengths, 4, "cuda", dtype)
    sinks = torch.linspace(-2, 3, 4 * KV_HEADS, device="cuda").to(dtype) if sinked else None
    tolerance = {torch.float32: 1e-4}.get(dtype, 2e-2)

    def check(run: object) -> None:
        expected = torch.empty_like(query, memory_format=torch.contiguous_format)
        paged_decode(expected, query, cache, indices, indptr, last, None, sinks)
        out.fill_(float("nan"))
        run()  # type: ignore[operator]
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)

    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    call = lambda: triton_form.paged_decode(  # noqa: E731
        out, query, cache, indices, indptr, last, sinks=sinks
    )
    check(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    check(graph.replay)
    # The same sequences, shorter: their last block holds less.
    last.clamp_(max=1)
    check(graph.replay)
