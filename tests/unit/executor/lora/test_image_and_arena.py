from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from adapter_store import LoRAModule
from executor.lora.arena import SlotArena
from executor.lora.cut import Cut
from executor.lora.errors import ModuleNotServed, ModuleShapeMismatch, NonFiniteWeights, RankTooLarge
from executor.lora.image import Buffer, build_slot_image
from executor.lora.layout import ALIGNMENT, SlotLayout, SlotSlice
from tests.unit.executor.lora.adapters import make_adapter, poison

SLICES = (
    SlotSlice("layers.0.q_proj", 33, 64),
    SlotSlice("layers.0.v_proj", 33, 7),
    SlotSlice("lm_head", 16, 9),
)
LAYOUT = SlotLayout(SLICES, 8, torch.float32)
Q, V = "layers.0.q_proj", "layers.0.v_proj"


def halves(arena: SlotArena, module: str, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    stacked = arena.stacked([module])
    return stacked.lora_a[0][slot], stacked.lora_b[0][slot]


@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_an_adapter_of_any_dtype_enters_a_slot_whole(target: torch.dtype, source: Any) -> None:
    layout = replace(LAYOUT, dtype=target)
    adapter = make_adapter(layout, {V: 3, "lm_head": 8}, seed=1, dtype=source)
    arena = SlotArena(layout, 2, "cpu")
    poison(arena, 1)
    image = build_slot_image(adapter, layout)
    arena.load(1, image)
    assert image.nbytes == layout.block_bytes(layout.pack([0, 3, 8])[1]) < arena.nbytes_per_slot
    assert arena.ranks[:, 1].tolist() == [0, 3, 8]
    assert arena.scales[:, 1].tolist() == [0, 0.75, 0.75]
    assert arena.ranks[:, 0].tolist() == [0, 0, 0]
    for name, module in adapter.items():
        for half, array in zip(halves(arena, name, 1), (module.lora_a, module.lora_b), strict=True):
            expected = torch.from_numpy(array.astype(np.float32)).to(target)
            assert torch.equal(half[: module.rank], expected)
            # What lies beyond, but for the rest of the last unit, is what was there.
            assert half.flatten()[expected.numel() + ALIGNMENT :].isnan().all()


def test_the_image_outlives_its_source() -> None:
    adapter = make_adapter(LAYOUT, {Q: 2}, seed=1)
    image = build_slot_image(adapter, LAYOUT)
    before = image.block.clone()
    array = adapter[Q].lora_a
    array.flags.writeable = True
    array[:] = 0
    assert torch.equal(image.block, before)


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16], ids=str)
def test_the_memory_that_an_image_is_built_in_may_hold_anything(target: torch.dtype) -> None:
    """With A dealt over three ranks, where the last row of a share may be missing."""
    cut = replace(SLICES[0], cut=Cut(shard=2, shards=3))
    layout = replace(LAYOUT, slices=(cut, *SLICES[1:]), dtype=target)
    adapter = make_adapter(layout, {Q: 4, "lm_head": 3}, seed=1)
    arenas = []
    for stale in (0, 0xFF):
        asked: list[int] = []

        def allocate(nbytes: int, stale: int = stale, asked: list[int] = asked) -> Buffer:
            asked.append(nbytes)
            return np.full(nbytes, stale, np.uint8)

        image = build_slot_image(adapter, layout, allocate)
        assert asked == [image.nbytes]
        arenas.append(SlotArena(layout, 1, "cpu"))
        arenas[-1].load(0, image)
    assert arenas[0].shrink_ranks[:, 0].tolist() == [2, 0, 3]
    for module, rows in ((Q, 2), ("lm_head", 3)):
        for half in (0, 1):
            first, second = (halves(arena, module, 0)[half][:rows] for arena in arenas)
            assert torch.equal(first, second)
            assert first.isfinite().all()


@pytest.mark.parametrize(
    ("value", "target", "refused"),
    [
        (1e6, torch.float16, True),
        (1e6, torch.bfloat16, False),
        (3.4e38, torch.bfloat16, True),
        (1e6, torch.float32, False),
        (np.nan, torch.float32, True),
        (np.inf, torch.float16, True),
        (-1e6, torch.float16, True),
        (-3.4e38, torch.bfloat16, True),
        (-3.3e38, torch.bfloat16, False),
        (-np.inf, torch.float32, True),
        (-np.nan, torch.bfloat16, True),
        (-0.0, torch.bfloat16, False),
    ],
)
@pytest.mark.parametrize("half", ["lora_a", "lora_b"])
def test_a_value_that_is_not_finite_after_the_cast_names_its_tensor(
    value: float, target: torch.dtype, refused: bool, half: str
) -> None:
    layout = replace(LAYOUT, dtype=target)
    module = make_adapter(layout, {V: 2}, seed=1)[V]
    array = getattr(module, half).copy()
    array[1, 4] = value
    adapter = {V: replace(module, **{half: array})}
    if not refused:
        build_slot_image(adapter, layout)
        return
    with pytest.raises(NonFiniteWeights, match=rf"layers\.0\.v_proj\.{half} \(float32\)"):
        build_slot_image(adapter, layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_memory_held_before_is_not_taken_for_weights(dtype: torch.dtype) -> None:
    """Between pieces it stays; there it is neither refused nor part of an answer."""
    layout = replace(LAYOUT, dtype=dtype)
    adapter = make_adapter(layout, {Q: 1, V: 3}, seed=1)
    plain = build_slot_image(adapter, layout, lambda nbytes: np.zeros(nbytes, np.uint8))
    used = build_slot_image(adapter, layout, lambda nbytes: np.full(nbytes, 0xFF, np.uint8))
    assert (used.block != plain.block).any(), "there is nothing between the pieces"
    arena = SlotArena(layout, 2, "cpu")
    arena.load(0, plain)
    arena.load(1, used)
    for name, module in adapter.items():
        for first, second in zip(halves(arena, name, 0), halves(arena, name, 1), strict=True):
            assert torch.equal(first[: module.rank], second[: module.rank])


def test_what_does_not_fit_a_slot_is_refused_by_name() -> None:
    wide = SlotLayout((*SLICES, SlotSlice("embed_tokens", 9, 16)), 64, torch.float32)
    with pytest.raises(RankTooLarge, match=r"layers\.0\.q_proj has rank 9, slots hold at most 8"):
        build_slot_image(make_adapter(wide, {Q: 9}, seed=1), LAYOUT)
    with pytest.raises(ModuleNotServed, match="embed_tokens"):
        build_slot_image(make_adapter(wide, {Q: 1, "embed_tokens": 1}, seed=1), LAYOUT)
    module = make_adapter(LAYOUT, {Q: 2}, seed=1)[Q]
    for half, shape in (("lora_a", (2, 34)), ("lora_a", (3, 33)), ("lora_b", (64, 2))):
        bad: LoRAModule = replace(module, **{half: np.zeros(shape, np.float32)})
        with pytest.raises(ModuleShapeMismatch, match=rf"layers\.0\.q_proj\.{half}"):
            build_slot_image({Q: bad}, LAYOUT)


def test_a_smaller_adapter_leaves_nothing_of_the_larger_one() -> None:
    arena = SlotArena(LAYOUT, 1, "cpu")
    large = build_slot_image(make_adapter(LAYOUT, {Q: 8, V: 8, "lm_head": 8}, seed=1), LAYOUT)
    small = build_slot_image(make_adapter(LAYOUT, {Q: 2}, seed=2), LAYOUT)
    for _ in range(2):
        arena.load(0, large)
        arena.load(0, small)
        assert arena.ranks[:, 0].tolist() == [2, 0, 0]
        weights = small.block.view(torch.float32)
        assert torch.equal(halves(arena, Q, 0)[0][:2].flatten(), weights[: 2 * 33])
    arena.clear(0)
    assert arena.ranks.any().item() is False
    assert arena.scales.any().item() is False


def test_a_foreign_image_or_slot_changes_nothing() -> None:
    arena = SlotArena(LAYOUT, 2, "cpu")
    image = build_slot_image(make_adapter(LAYOUT, {Q: 2}, seed=1), LAYOUT)
    arena.load(1, image)
    other = replace(LAYOUT, max_rank=16)
    with pytest.raises(ValueError, match="layout"):
        arena.load(1, build_slot_image(make_adapter(other, {V: 2}, seed=1), other))
    for slot in (-1, 2):
        with pytest.raises(ValueError, match="slot"):
            arena.load(slot, image)
        with pytest.raises(ValueError, match="slot"):
            arena.clear(slot)
    assert arena.ranks.tolist() == [[0, 2], [0, 0], [0, 0]]


def test_views_share_the_stripe_and_need_neighbours() -> None:
    arena = SlotArena(LAYOUT, 2, "cpu")
    stacked = arena.stacked([Q, V])
    assert [tuple(a.shape) for a in stacked.lora_a] == [(2, 8, 33), (2, 8, 33)]
    assert [tuple(b.shape) for b in stacked.lora_b] == [(2, 8, 64), (2, 8, 7)]
    arena.storage.fill_(5.0)
    assert all((view == 5.0).all() for view in (*stacked.lora_a, *stacked.lora_b))
    with pytest.raises(ValueError, match="neighbours"):
        arena.stacked([Q, "lm_head"])
