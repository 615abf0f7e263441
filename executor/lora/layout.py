"""Where each module's factors lie in a slot."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import torch

FORMAT_VERSION = 1
# Every piece starts on a multiple of this many elements: 128 bytes of a 2-byte dtype, so that 16-byte loads
# and whole cache lines fit whatever the widths are.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class SlotSlice:
    """One module's place: A [rank, in_features], then B rank-major [rank, out_features]."""

    module: str
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice's offsets, in elements from the start of the buffer, for `rank` rows of A and of B."""

    rank: int
    a_offset: int
    b_offset: int


@dataclass(frozen=True)
class SlotLayout:
    """The order of the slices, and with it every offset.

    A stripe (a slot in the arena) is packed at full rank, so that each slice keeps its place whatever the
    adapter; an image is packed at the adapter's own ranks. Both by the same rule: in each piece, rank r is a
    contiguous prefix of rank max_rank. Example, max_rank 4, one slice 64 -> 32: the stripe is A [0, 256),
    B [256, 384); the image of rank 1 is A [0, 64), B [64, 96), padded to 128.
    """

    slices: tuple[SlotSlice, ...]
    max_rank: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if len(self.index) != len(self.slices):
            raise ValueError("slices name a module twice")

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Module name -> number of its slice."""
        return {part.module: number for number, part in enumerate(self.slices)}

    @cached_property
    def stripe(self) -> tuple[Piece, ...]:
        return self.pack(list(repeat(self.max_rank, len(self.slices))))[0]

    @cached_property
    def slot_elements(self) -> int:
        return self.pack(list(repeat(self.max_rank, len(self.slices))))[1]

    @cached_property
    def slot_layout(self) -> str:
        """Hash of everything that places an image's bytes: images made for another layout do not fit.

        It leaves out the base model: no byte of a plain LoRA image depends on the base's weights.
        """
        parts = [[part.module, part.in_features, part.out_features] for part in self.slices]
        text = json.dumps([FORMAT_VERSION, ALIGNMENT, str(self.dtype), self.max_rank, parts])
        return hashlib.sha256(text.encode()).hexdigest()

    def pack(self, ranks: Sequence[int]) -> tuple[tuple[Piece, ...], int]:
        """Every slice's offsets at the given ranks (one a slice, 0: no room), and the elements needed."""
        pieces, cursor = [], 0
        for part, rank in zip(self.slices, ranks, strict=True):
            b_offset = _aligned(cursor + rank * part.in_features)
            pieces.append(Piece(rank, cursor, b_offset))
            cursor = _aligned(b_offset + rank * part.out_features)
        return tuple(pieces), cursor


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT
