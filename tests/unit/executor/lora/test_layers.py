import random
from itertools import product

import pytest
import torch

from executor.distributed import SINGLE, ParallelGroup
from executor.lora.arena import SlotArena
from executor.lora.config import LoRAConfig
from executor.lora.errors import ModuleNotServed, ModuleShapeMismatch, RankTooLarge
from executor.lora.image import build_slot_image
from executor.lora.layers import BaseLayerWithLoRA
from executor.lora.layers.sharded import gathered
from executor.lora.layout import SlotLayout
from kernels.errors import KernelArgumentError
from kernels.metadata.meta import LoRAMapping, Run
from tests.unit.executor.lora.adapters import make_adapter, poison
from tests.unit.executor.lora.layer_cases import CASES, EVERY_KIND, HIDDEN, MODEL_CONFIG, Rig, make_rig

ALL = pytest.mark.parametrize("name", CASES)
RANKS = [1, 2, 3, 5, 8, 12, 16, 24, 48, 64]


def compare(rig: Rig, runs: list[Run]) -> torch.Tensor:
    """Every row equals the plain answer; base rows equal the base layer to the bit."""
    x = rig.inputs(sum(count for _, count in runs))
    y, base = rig.run(runs, x), rig.base(x)
    torch.testing.assert_close(y.double(), rig.expected(runs, x), rtol=2e-5, atol=2e-5)
    without = torch.tensor([slot == -1 for slot, count in runs for _ in range(count)], dtype=torch.bool)
    assert torch.equal(y[without], base[without])
    return y


def parts_of(rig: Rig) -> int:
    return len(rig.layer.module_names)


@ALL
def test_ranks_of_all_sizes_and_base_rows_in_one_batch(name: str) -> None:
    torch.manual_seed(0)
    rig = make_rig(name, max_loras=10, max_rank=64)
    for slot, rank in enumerate(RANKS):
        rig.put(slot, [rank] * parts_of(rig))
    compare(rig, [(9, 1), (-1, 2), *((slot, 1) for slot in range(10)), (0, 3), (-1, 1)])


@ALL
def test_steps_in_any_order_leave_nothing_behind(name: str) -> None:
    torch.manual_seed(0)
    rig = make_rig(name, max_loras=3, max_rank=8)
    rig.put(0, [4] * parts_of(rig))
    rig.put(1, [8] * parts_of(rig))
    mixed: list[Run] = [(0, 1), (1, 1)]
    for runs in (
        mixed,
        [(-1, 2)],
        mixed,
        [],
        [(-1, 1), (0, 3)],
        [(0, 3), (-1, 1), (1, 2), (-1, 4)],
        [(1, 1)],
        [(2, 2)],  # a slot that was never filled adds nothing
    ):
        compare(rig, runs)


@ALL
def test_a_reused_slot_answers_like_a_cold_one(name: str) -> None:
    torch.manual_seed(0)
    rig, cold = (make_rig(name, max_loras=1, max_rank=16) for _ in range(2))
    cold.layer.base_layer.load_state_dict(rig.layer.base_layer.state_dict())
    cold.head.load_state_dict(rig.head.state_dict())
    cold.whole.load_state_dict(rig.whole.state_dict())
    small = [4] + [0] * (parts_of(rig) - 1)
    cold.put(0, small)
    x = rig.inputs(5)
    expected = cold.run([(0, 5)], x)
    factors = cold.adapters[0]
    for _ in range(2):
        rig.put_over(0, [16] * parts_of(rig))
        assert not torch.equal(rig.run([(0, 5)], x), expected)
        rig.set(0, factors)
        assert torch.equal(rig.run([(0, 5)], x), expected)
    rig.layer.reset_lora(0)
    assert torch.equal(rig.run([(0, 5)], x), rig.base(x))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(("qkv", r) for r in ([4, 0, 0], [4, 0, 2], [0, 4, 0], [0, 0, 4])),
        *(("two parts", r) for r in ([4, 0], [0, 4])),
    ],
)
def test_a_missing_member_of_a_packed_layer_adds_exactly_nothing(name: str, ranks: list[int]) -> None:
    torch.manual_seed(0)
    rig = make_rig(name, max_loras=2, max_rank=4)
    rig.put(1, ranks)
    x = rig.inputs(6)
    y, base = rig.run([(1, 6)], x), rig.base(x)
    torch.testing.assert_close(y.double(), rig.expected([(1, 6)], x), rtol=2e-5, atol=2e-5)
    for part, rank in zip(rig.layer.all_parts, ranks, strict=True):
        columns = slice(part.column_start, part.column_start + part.slot_slice.b_width)
        assert torch.equal(y[:, columns], base[:, columns]) == (rank == 0)


def test_random_orders_of_rows() -> None:
    torch.manual_seed(0)
    rig = make_rig("qkv", max_loras=6, max_rank=8)
    for slot in range(6):
        rig.put(slot, [slot + 1, 8 - slot, (3 * slot) % 7])
    for seed in range(200):
        choice = random.Random(seed)
        compare(rig, [(choice.randrange(-1, 6), 1) for _ in range(32)])


@ALL
def test_an_image_in_the_arena_equals_set_lora(name: str) -> None:
    torch.manual_seed(0)
    rig = make_rig(name, max_loras=2, max_rank=8)
    config = LoRAConfig(2, 8, EVERY_KIND)
    slices = tuple(part.slot_slice for part in rig.layer.served_parts(config, MODEL_CONFIG))
    arena = SlotArena(SlotLayout(slices, 8, torch.float32), 2, "cpu")
    rig.layer.create_lora_weights(2, config, MODEL_CONFIG, arena=arena)
    adapter = make_adapter(arena.layout, dict.fromkeys(rig.layer.module_names, 5), seed=3)
    x = rig.inputs(7)
    poison(arena, 0)
    arena.load(0, build_slot_image(adapter, arena.layout))
    loaded = rig.run([(0, 4), (-1, 3)], x)
    modules = [adapter[module] for module in rig.layer.module_names]
    rig.set(1, [(torch.tensor(m.lora_a), torch.tensor(m.lora_b).T, m.scale) for m in modules])
    assert torch.equal(loaded, rig.run([(1, 4), (-1, 3)], x))
    torch.testing.assert_close(loaded.double(), rig.expected([(1, 4), (-1, 3)], x), rtol=2e-5, atol=2e-5)


@ALL
def test_rows_must_be_the_steps(name: str) -> None:
    torch.manual_seed(0)
    rig = make_rig(name, max_loras=2, max_rank=4)
    rig.punica.update_metadata(LoRAMapping(((0, 3),), ((0, 3),)))
    with pytest.raises(KernelArgumentError, match="has shape"):
        rig.call(rig.inputs(4))


def test_the_head_counts_its_own_rows() -> None:
    torch.manual_seed(0)
    rig = make_rig("head", max_loras=2, max_rank=4)
    rig.put(0, [4])
    rig.put(1, [2])
    x = rig.inputs(3)
    expected = rig.run([(1, 1), (0, 2)], x)
    rig.punica.update_metadata(LoRAMapping(((0, 40), (1, 5), (0, 9)), ((1, 1), (0, 2))))
    assert torch.equal(rig.call(x), expected)


def test_only_served_members_take_room_and_others_are_refused() -> None:
    torch.manual_seed(0)
    kinds = frozenset({"q_proj", "v_proj"})
    rig = make_rig("qkv", max_loras=2, max_rank=4, modules=kinds)
    assert [tuple(b.shape) for b in rig.layer.lora_b_stacked] == [(2, 24, 4), (2, 12, 4)]
    assert [tuple(a.shape) for a in rig.layer.lora_a_stacked] == [(2, 4, HIDDEN)] * 2
    rig.put(0, [4, 0, 2])
    compare(rig, [(0, 3), (-1, 1), (1, 1)])
    with pytest.raises(ModuleNotServed, match=r"layers\.0\.k_proj"):
        rig.put_over(0, [4, 1, 2])


def test_set_lora_refuses_what_does_not_fit_and_keeps_the_slot() -> None:
    torch.manual_seed(0)
    rig = make_rig("two parts", max_loras=1, max_rank=4)
    rig.put(0, [4, 2])
    a, b = torch.zeros(2, HIDDEN), torch.zeros(24, 2)
    for error, lora_a, lora_b in (
        (RankTooLarge, [torch.zeros(5, HIDDEN), None], [torch.zeros(24, 5), None]),
        (ModuleShapeMismatch, [torch.zeros(2, HIDDEN + 1), None], [b, None]),
        (ModuleShapeMismatch, [a, None], [torch.zeros(24, 3), None]),
        (ValueError, [a, None], [None, b]),
        (ValueError, a, b),
    ):
        with pytest.raises(error):
            rig.layer.set_lora(0, lora_a, lora_b)
    with pytest.raises(ValueError, match="scaling"):
        rig.layer.set_lora(0, [a, a], [b, b], [1.0])
    with pytest.raises(ValueError, match="index 1"):
        rig.layer.set_lora(1, [a, a], [b, b])
    compare(rig, [(0, 3)])


def test_scaling_defaults_to_one() -> None:
    rig = make_rig("row", max_loras=1, max_rank=4)
    a, b, x = torch.randn(2, HIDDEN), torch.randn(12, 2), torch.randn(3, HIDDEN)
    rig.layer.set_lora(0, a, b)
    torch.testing.assert_close(rig.run([(0, 3)], x), rig.base(x) + x @ a.T @ b.T)


@ALL
def test_one_module_is_sliced_from_a_tensor_to_a_tensor(name: str) -> None:
    """As a list of one is; in a layer of several a tensor alone names no module."""
    for size, fully_sharded in product((1, 2), (False, True)):
        for rank in range(size):
            group = ParallelGroup(rank, size)
            layer = make_rig(name, 1, 4, group=group, fully_sharded=fully_sharded).layer
            whole = layer.all_parts[0].slot_slice
            a, b = torch.randn(3, whole.in_features), torch.randn(whole.out_features, 3)
            for cut, factor in ((layer.slice_lora_a, a), (layer.slice_lora_b, b)):
                if len(layer.module_names) > 1:
                    with pytest.raises(ValueError, match="one tensor for"):
                        cut(factor)
                else:
                    (listed,) = cut([factor])
                    assert listed is not None
                    assert torch.equal(cut(factor), listed)


def test_the_ranks_slices_make_up_the_whole() -> None:
    a, b = torch.randn(3, HIDDEN), torch.randn(12, 3)
    column, row = (
        [make_rig(name, 1, 4, group=ParallelGroup(rank, 2)).layer for rank in range(2)]
        for name in ("column", "row")
    )
    assert all(torch.equal(layer.slice_lora_a(a), a) for layer in column)
    assert torch.equal(torch.cat([layer.slice_lora_b(b) for layer in column]), b)
    assert torch.equal(torch.cat([layer.slice_lora_a(a) for layer in row], dim=1), a)
    assert all(torch.equal(layer.slice_lora_b(b), b) for layer in row)


def test_a_layer_without_served_part_is_refused() -> None:
    case = CASES["row"]
    layer: BaseLayerWithLoRA = case.layer_class(case.make_base(SINGLE), case.names)
    with pytest.raises(ValueError, match=r"layers\.0\.down_proj"):
        layer.create_lora_weights(1, LoRAConfig(1, 1, frozenset({"q_proj"})), MODEL_CONFIG)


def test_three_parts_take_one_adapter_over_all_as_one_tensor() -> None:
    torch.manual_seed(0)
    rig = make_rig("three parts", max_loras=2, max_rank=4)
    a, b = torch.randn(3, HIDDEN), torch.randn(28, 3)
    rig.layer.set_lora(0, a, b, 0.5)
    rig.set(1, [(a, part, 0.5) for part in b.split([8, 16, 4])])
    x = rig.inputs(2)
    assert torch.equal(rig.run([(0, 2)], x), rig.run([(1, 2)], x))
    compare(rig, [(1, 2), (-1, 1)])
    with pytest.raises(ValueError, match="for 3 parts"):
        rig.layer.set_lora(0, a, torch.randn(27, 3))


@pytest.mark.parametrize("max_rank", [1, 3])
def test_a_gathered_hidden_is_laid_out_as_kernels_read_it(max_rank: int) -> None:
    """Of a single rank, too, where any stride of the last dimension counts as contiguous."""
    h = torch.randn(2, 10, max_rank)
    whole = gathered(SINGLE, h, max_rank)
    assert torch.equal(whole, h)
    assert whole.stride() == (10 * max_rank, max_rank, 1)


def test_a_hidden_that_was_gathered_without_need_is_refused() -> None:
    """A gather of ranks that each hold A whole would give the product `ranks` times as many columns."""
    rig = make_rig("column", max_loras=2, max_rank=4)
    rig.punica.update_metadata(LoRAMapping(((0, 3),), ((0, 3),)))
    stacked = rig.layer.stacked
    for columns in (8, 2):
        with pytest.raises(KernelArgumentError, match="h must be float32"):
            rig.punica.add_expand(
                torch.zeros(3, 12), torch.zeros(1, 3, columns), stacked.lora_b, stacked.ranks, (0,)
            )
