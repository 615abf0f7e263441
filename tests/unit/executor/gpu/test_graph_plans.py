import numpy as np
import pytest

from executor.gpu.graph_plans import GraphSizes, LoRAPlans, head_runs, rehearsal_runs, step_runs
from executor.step.inputs import SequenceRows
from kernels.launching.follower_tuning import beside_pays
from kernels.metadata.meta import LoRAKernelMeta

SIZES = GraphSizes.up_to(256, 8192)
PLANS = LoRAPlans(max_loras=64, max_rank=16)
TALL = LoRAPlans(max_loras=64, max_rank=100)
USUAL, HIGH = np.full(64, 16, dtype=np.int32), np.full(64, 17, dtype=np.int32)


def runs(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, dtype=np.int32).reshape(-1, 2)


def test_sizes_end_at_what_can_come() -> None:
    assert GraphSizes.up_to(6, 64) == GraphSizes((1, 2, 4, 6), (32, 64))
    assert (SIZES.decode[0], SIZES.decode[-1], SIZES.mixed[-1], SIZES.largest) == (1, 256, 512, 512)


@pytest.mark.parametrize(("most", "beyond"), [(512, ()), (700, (640,)), (1024, (640, 768, 896, 1024))])
def test_larger_mixed_steps_are_captured_if_wished(most: int, beyond: tuple[int, ...]) -> None:
    sizes = GraphSizes.up_to(256, 8192, most)
    assert (sizes.mixed, sizes.decode) == ((*SIZES.mixed, *beyond), SIZES.decode)
    assert GraphSizes.up_to(256, 600, most) == SIZES


@pytest.mark.parametrize(
    ("rows", "decode", "size"),
    [(1, True, 1), (3, True, 4), (64, True, 64), (65, True, 80), (256, True, 256), (257, True, 0),
     (0, True, 0), (3, False, 32), (512, False, 512), (513, False, 0)],
)  # fmt: skip
def test_the_smallest_captured_step_that_is_large_enough(rows: int, decode: bool, size: int) -> None:
    assert SIZES.fitting(rows, decode) == size


def test_a_base_only_step_runs_no_lora_kernel() -> None:
    assert PLANS.choose(runs((-1, 7), (-1, 1)), 8, True, USUAL) is None


@pytest.mark.parametrize(("plans", "ranks"), [(PLANS, USUAL), (TALL, USUAL), (TALL, HIGH)])
@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("adapters", [1, 2, 8, 40, 64])
@pytest.mark.parametrize("rows", [1, 4, 9, 64, 200, 256])
def test_every_step_fits_the_plan_that_is_chosen_for_it(
    rows: int, adapters: int, decode: bool, plans: LoRAPlans, ranks: np.ndarray
) -> None:
    """The metadata refuses a plan that is too small, and a plan must be among those captured."""
    size = SIZES.fitting(rows, decode)
    own = [(n % adapters, 1) for n in range(rows)]
    for step in (own, own[: rows // 2 + 1]):
        filled = runs(*step, (-1, size - len(step)))
        plan = plans.choose(filled, size, decode, ranks)
        assert plan is not None and plan in (plans.of_decode(size) if decode else plans.of_mixed(size))
        meta = LoRAKernelMeta.make(64, 512, "cpu")
        for fitting in (plan, plans.for_any(size, decode)):
            meta.prepare_tensors(filled, fitting)
            assert (meta.plan, meta.num_rows) == (fitting, size)


@pytest.mark.parametrize("max_rank", [16, 32])
@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("rows", [64, 80, 128, 256])
def test_a_step_on_64_adapters_launches_with_512_slots_what_it_does_with_64(
    rows: int, decode: bool, max_rank: int
) -> None:
    few, many = LoRAPlans(64, max_rank), LoRAPlans(512, max_rank)
    size = SIZES.fitting(rows, decode)
    for rank in (16, max_rank):
        ranks = np.full(512, rank, dtype=np.int32)
        for adapters in (1, 8, 24, 40, 64):
            step = runs(*((n % adapters, 1) for n in range(rows)), (-1, size - rows))
            spread = step.copy()
            spread[step[:, 0] >= 0, 0] *= 7  # of slots that are not neighbours
            plans = few.choose(step, size, decode, ranks[:64]), many.choose(spread, size, decode, ranks)
            assert plans[0] == plans[1]


def test_steps_on_more_adapters_than_that_have_plans_of_their_own() -> None:
    many, ranks = LoRAPlans(512, 32), np.full(512, 32, dtype=np.int32)
    assert [plan.items for plan in many.of_mixed(512)] == [96, 96, 160, 288, 512]
    assert [plan.block_rank for plan in many.of_mixed(512)] == [16, 32, 16, 16, 16]
    assert len(many.of_mixed(64)) == len(LoRAPlans(64, 32).of_mixed(64))
    for adapters, items in ((90, 96), (96, 96), (97, 160), (200, 288), (300, 512), (512, 512)):
        step = runs(*((n, 1) for n in range(adapters)), (-1, 512 - adapters))
        plan = many.choose(step, 512, False, ranks)
        assert plan is not None and plan.items == items
        meta = LoRAKernelMeta.make(512, 512, "cpu")
        for fitting in (plan, many.for_any(512, False)):
            meta.prepare_tensors(step, fitting)
            assert meta.num_active_loras == adapters


def test_every_captured_step_is_rehearsed_within_its_plan() -> None:
    meta = LoRAKernelMeta.make(64, SIZES.largest, "cpu")
    for decode, sizes in ((True, SIZES.decode), (False, SIZES.mixed)):
        for rows in sizes:
            for plan in TALL.of_decode(rows) if decode else TALL.of_mixed(rows):
                meta.prepare_tensors(rehearsal_runs(plan, rows), plan)
                assert meta.num_rows == rows
                assert meta.num_active_loras == 1


def test_families_by_how_rows_share_adapters() -> None:
    adapters = 1, 8, 9, 24, 25, 64
    chosen = [PLANS.choose(runs(*((n % k, 1) for n in range(64))), 64, True, USUAL) for k in adapters]
    families = [(plan.rows_per_item, plan.items) for plan in chosen if plan]
    assert families == [(16, 8), (16, 8), (16, 24), (16, 24), (16, 64), (1, 64)]
    assert [beside_pays(plan) for plan in chosen if plan] == [True, True, True, True, False, True]
    many = PLANS.choose(runs(*((n % 30, 1) for n in range(256))), 256, True, USUAL)
    assert many is not None and (many.rows_per_item, many.items) == (16, 80)


def test_entries_that_rows_share_have_a_high_tile_where_more_than_a_quarter_of_the_rows_need_it() -> None:
    ranks = np.array([16, 64, 16, 32, *[0] * 60], dtype=np.int32)
    assert {plan.block_rank for size in SIZES.decode for plan in PLANS.of_decode(size)} == {16}
    for decode in (True, False):
        steps = [runs((0, 64 - high), (1, high)) for high in (0, 16, 17, 64)]
        chosen = [TALL.choose(step, 64, decode, ranks) for step in steps]
        assert [plan.block_rank for plan in chosen if plan] == [16, 16, 64, 64]
    steps_and_heights = (
        (((1, 1), (0, 1)), 1), (((0, 2), (2, 2)), 1), (((3, 2), (0, 2)), 1), (((3, 3), (0, 2)), 16),
        (((1, 2), (0, 2)), 16),
    )  # fmt: skip
    for step, rows in steps_and_heights:
        plan = TALL.choose(runs(*step, (-1, 16 - sum(own for _, own in step))), 16, True, ranks)
        assert plan is not None and (plan.rows_per_item, plan.block_rank) == (rows, 16 if rows == 1 else 64)
    for max_rank, highest in ((8, 8), (9, 16), (17, 32), (33, 64), (256, 64)):
        assert LoRAPlans(64, max_rank).for_any(64, True).block_rank == highest


def test_runs_of_a_step_and_of_its_head() -> None:
    sequences = [SequenceRows([1, 2, 3], 0, [0], 4, (0, 2)), SequenceRows([9], 5, [1], -1, ())]
    assert step_runs(sequences, 8).tolist() == [[4, 3], [-1, 1], [-1, 4]]
    assert step_runs(sequences).tolist() == [[4, 3], [-1, 1]]
    assert head_runs(sequences).tolist() == [[4, 2], [-1, 0]]
    assert head_runs([]).shape == (0, 2)
