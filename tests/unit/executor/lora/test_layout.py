from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.lora.cut import Cut
from executor.lora.layout import ALIGNMENT, SlotLayout, SlotSlice

SLICES = tuple(SlotSlice(f"layers.0.{kind}", 33, width) for kind, width in (("q_proj", 64), ("v_proj", 7)))
LAYOUT = SlotLayout(SLICES, 8, torch.float32)


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90), st.integers(0, 8)), max_size=6))
def test_pieces_are_aligned_and_do_not_overlap(sizes: list[tuple[int, int, int]]) -> None:
    slices = tuple(SlotSlice(str(i), a, b) for i, (a, b, _) in enumerate(sizes))
    layout = SlotLayout(slices, 8, torch.float32)
    ranks = [rank for _, _, rank in sizes]
    pieces, total = layout.pack(ranks)
    end = 0
    for part, piece, rank in zip(slices, pieces, ranks, strict=True):
        for offset, elements, width in (
            (piece.a_offset, piece.a_elements, part.in_features),
            (piece.b_offset, piece.b_elements, part.out_features),
        ):
            assert offset % ALIGNMENT == 0
            assert offset >= end
            assert elements == rank * width
            end = offset + elements
    assert end <= total <= layout.slot_elements


def test_rank_zero_takes_no_room() -> None:
    assert LAYOUT.pack([0, 0])[1] == 0
    assert LAYOUT.pack([8, 8]) == (LAYOUT.stripe, LAYOUT.slot_elements)


def test_hash_changes_with_everything_that_moves_a_byte() -> None:
    others = [
        replace(LAYOUT, max_rank=16),
        replace(LAYOUT, dtype=torch.bfloat16),
        replace(LAYOUT, slices=SLICES[:1]),
        replace(LAYOUT, slices=SLICES[::-1]),
        replace(LAYOUT, slices=(SLICES[0], replace(SLICES[1], out_features=8))),
        replace(LAYOUT, slices=(SLICES[0], replace(SLICES[1], cut=Cut(range(11))))),
        replace(LAYOUT, slices=(SLICES[0], replace(SLICES[1], cut=Cut(b_columns=(range(7),))))),
        replace(LAYOUT, slices=(SLICES[0], replace(SLICES[1], cut=Cut(shards=2)))),
        replace(LAYOUT, slices=(SLICES[0], replace(SLICES[1], cut=Cut(shards=2, shard=1)))),
        replace(LAYOUT, tp_size=2),
        replace(LAYOUT, tp_size=2, tp_rank=1),
        replace(LAYOUT, fully_sharded=True),
    ]
    hashes = {layout.slot_layout for layout in [LAYOUT, *others]}
    assert len(hashes) == len(others) + 1
    assert SlotLayout(SLICES, 8, torch.float32).slot_layout == LAYOUT.slot_layout


def test_a_module_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        SlotLayout((SLICES[0], SLICES[0]), 8, torch.float32)
