"""What each rank of a group holds of a base layer, in plain numbers."""

from collections.abc import Callable

import pytest
import torch

from executor.distributed import SINGLE, ParallelGroup
from executor.layers import (
    ColumnParallelLinear,
    LinearBase,
    LogitsProcessor,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)


def ranges(qkv: QKVParallelLinear) -> list[tuple[int, int]]:
    return [(own.start, own.stop) for own in qkv.output_ranges]


def test_heads_are_cut_and_kv_heads_replicated_to_the_ranks_that_share_one() -> None:
    """4 query heads over 2 KV heads of width 3: query heads 0, 1 read KV head 0, and 2, 3 read 1."""
    qkv = [
        [ranges(QKVParallelLinear(8, 3, 4, 2, group=ParallelGroup(rank, size))) for rank in range(size)]
        for size in (1, 2, 4)
    ]
    assert qkv[0] == [[(0, 12), (0, 6), (0, 6)]]
    assert qkv[1] == [[(0, 6), (0, 3), (0, 3)], [(6, 12), (3, 6), (3, 6)]]
    assert qkv[2] == [
        [(0, 3), (0, 3), (0, 3)],
        [(3, 6), (0, 3), (0, 3)],
        [(6, 9), (3, 6), (3, 6)],
        [(9, 12), (3, 6), (3, 6)],
    ]


def test_merged_parts_are_cut_one_by_one() -> None:
    layer = MergedColumnParallelLinear(4, (8, 2, 6), group=ParallelGroup(1, 2), tensor_parts=(2, 1))
    assert layer.output_partition_sizes == (4, 1, 3)
    assert layer.parts_behind(2) == (range(2), range(2, 3))
    assert layer.rows_in_tensor(range(2)) == (range(4, 8), range(9, 10))
    assert layer.rows_in_tensor(range(2, 3)) == (range(3, 6),)


def test_a_rows_input_is_cut_and_its_bias_is_added_once() -> None:
    x = torch.arange(8.0)[None]
    whole = RowParallelLinear(8, 2, bias=True)
    whole.weight.fill_(1.0)
    assert whole.bias is not None
    whole.bias.fill_(100.0)
    total = torch.zeros(1, 2)
    for rank in range(4):
        own = RowParallelLinear(8, 2, True, ParallelGroup(rank, 4))
        own.weight.fill_(1.0)
        assert own.bias is not None
        own.bias.fill_(100.0)
        total += own.partial(x[:, own.input_range.start : own.input_range.stop])
    assert torch.equal(total, whole(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: ReplicatedLinear(4, 6, True, **options),
        lambda **options: ColumnParallelLinear(4, 6, True, **options),
        lambda **options: MergedColumnParallelLinear(4, (4, 2), True, **options),
        lambda **options: QKVParallelLinear(4, 1, 2, 2, True, **options),
        lambda **options: RowParallelLinear(4, 6, True, **options),
    ],
)
def test_a_bias_stays_out_of_the_output_and_comes_beside_it(make: Callable[..., LinearBase]) -> None:
    layers = [make(skip_bias_add=skip, return_bias=True) for skip in (False, True)]
    plain, without = make(), make(skip_bias_add=True)
    for layer in (*layers, plain, without):
        assert layer.bias is not None
        layer.weight.fill_(1.0)
        layer.bias.fill_(100.0)
    x = torch.arange(8.0).view(2, 4)
    (added, nothing), (y, bias) = (layer(x) for layer in layers)
    assert torch.equal(added, plain(x))
    assert nothing is None
    assert torch.equal(y, plain(x) - 100.0)
    assert bias is layers[1].bias
    assert torch.equal(without(x), y)


def test_a_row_takes_its_share_of_whole_inputs_and_may_leave_the_sum_to_others() -> None:
    x = torch.arange(8.0)[None]
    own = RowParallelLinear(8, 2, False, ParallelGroup(1, 4), input_is_parallel=False, reduce_results=False)
    own.weight.fill_(1.0)
    assert own(x).tolist() == [[5.0, 5.0]]  # 2 + 3, no other rank asked


def test_a_share_of_the_bias_beside_whole_outputs_is_refused() -> None:
    with pytest.raises(ValueError, match="gather_output with skip_bias_add"):
        ColumnParallelLinear(4, 6, True, ParallelGroup(0, 2), gather_output=True, skip_bias_add=True)


def test_the_vocabulary_is_padded_at_its_end_only() -> None:
    tables = [VocabParallelEmbedding(10, 2, ParallelGroup(rank, 4)) for rank in range(4)]
    assert [list(table.vocab_range) for table in tables] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert all(table.weight.shape == (3, 2) for table in tables)
    assert not tables[3].weight[1:].any()
    local_ids, foreign = tables[1].local(torch.tensor([2, 3, 5, 6]))
    assert local_ids.tolist() == [0, 0, 2, 0]
    assert foreign is not None
    assert foreign.tolist() == [True, False, False, True]
    assert VocabParallelEmbedding(10, 2).local(torch.tensor([2]))[1] is None


@pytest.mark.parametrize("size", [3, 8])
def test_heads_that_do_not_divide_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"over {size} ranks"):
        QKVParallelLinear(8, 3, 4, 2, group=ParallelGroup(0, size))


def test_sizes_that_do_not_divide_are_refused() -> None:
    for make in (
        lambda group: MergedColumnParallelLinear(8, (4, 3), group=group),
        lambda group: RowParallelLinear(9, 4, group=group),
        lambda group: QKVParallelLinear(8, 3, 6, 3, group=group),
    ):
        with pytest.raises(ValueError, match="over 2 ranks"):
            make(ParallelGroup(0, 2))
    with pytest.raises(ValueError, match="without a token"):
        LogitsProcessor(9, ParallelGroup(0, 4))
    with pytest.raises(ValueError, match="tensor_parts"):
        MergedColumnParallelLinear(8, (4, 4), tensor_parts=(1, 2))


def test_one_rank_calls_nothing() -> None:
    x = torch.ones(2)
    assert SINGLE.all_reduce(x) is x
    assert SINGLE.all_gather(x).shape == (1, 2)
    assert SINGLE.broadcast(x) is x
