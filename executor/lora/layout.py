"""Where each module's A and B lie in a slot."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat

import torch

from executor.distributed import SINGLE, ParallelGroup
from executor.lora.config import LoRAConfig
from executor.lora.cut import Cut
from kernels.launching.slot_block import table_bytes

FORMAT_VERSION = 3
# Every piece starts on a multiple of this many elements: 128 bytes of a 1-byte dtype, so that 16-byte loads
# and whole cache lines fit whatever the widths are, and pieces are whole units of
# kernels/launching/slot_block.py.
ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class SlotSlice:
    """One module's place on one rank: its cut of A [rank, in_features], then of B rank-major [rank,
    out_features].

    With stacked experts a row holds theirs side by side: [rank, experts, in_features]. So at any rank the
    rows are a prefix of those at a higher one, as without experts. The numbers are the whole module's.
    """

    module: str
    in_features: int
    out_features: int
    cut: Cut = field(default=Cut())
    num_experts: int = 0  # 0: a plain module

    @property
    def row_experts(self) -> int:
        """Experts of this rank, side by side in a row; 1 for a plain module."""
        if not self.num_experts:
            return 1
        return self.num_experts if self.cut.experts is None else len(self.cut.experts)

    @property
    def a_width(self) -> int:
        return self.row_experts * self.cut.a_width(self.in_features)

    @property
    def b_width(self) -> int:
        return self.row_experts * self.cut.b_width(self.out_features)


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a slice lies for some rank, in elements from the start of the buffer; each half is contiguous."""

    a_offset: int
    a_elements: int
    b_offset: int
    b_elements: int


@dataclass(frozen=True)
class SlotLayout:
    """The order of the slices, and with it every offset, on one rank of a tensor-parallel group.

    A stripe (a slot in the arena) is packed at full rank, so that each slice keeps its place whatever the
    adapter; an image is packed at the adapter's own ranks. Both by the same rule: in each piece, rank r is a
    contiguous prefix of rank max_rank. Example, max_rank 4, one slice 64 -> 32: the stripe is A [0, 256),
    B [256, 384); the image of rank 1 is A [0, 64), B [64, 96), padded to 128.
    """

    slices: tuple[SlotSlice, ...]
    max_rank: int
    dtype: torch.dtype
    tp_rank: int = 0
    tp_size: int = 1
    fully_sharded: bool = False

    @classmethod
    def on_rank(
        cls, slices: Iterable[SlotSlice], config: LoRAConfig, group: ParallelGroup = SINGLE
    ) -> "SlotLayout":
        sharded = config.fully_sharded_loras
        return cls(tuple(slices), config.max_lora_rank, config.dtype, group.rank, group.size, sharded)

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
    def max_block_bytes(self) -> int:
        """The bytes of an image at full rank."""
        return self.block_bytes(self.slot_elements)

    def block_bytes(self, elements: int) -> int:
        """The bytes of an image with so many elements of weights, with its table."""
        return elements * self.dtype.itemsize + table_bytes(len(self.slices))

    @cached_property
    def slot_layout(self) -> str:
        """Hash of everything that places an image's bytes: images made for another layout do not fit.

        It leaves out the base model: no byte of a plain LoRA image depends on the base's weights.
        """
        parts = [
            [part.module, part.in_features, part.out_features, part.num_experts, part.cut.key()]
            for part in self.slices
        ]
        ranks = [self.tp_rank, self.tp_size, self.fully_sharded]
        text = json.dumps([FORMAT_VERSION, ALIGNMENT, str(self.dtype), self.max_rank, ranks, parts])
        return hashlib.sha256(text.encode()).hexdigest()

    def pack(self, ranks: Sequence[int]) -> tuple[tuple[Piece, ...], int]:
        """Every slice's offsets at the given ranks (one a slice, 0: no room), and the elements needed."""
        pieces, cursor = [], 0
        for part, rank in zip(self.slices, ranks, strict=True):
            a_elements, b_elements = part.cut.a_rows(rank) * part.a_width, rank * part.b_width
            b_offset = _aligned(cursor + a_elements)
            pieces.append(Piece(cursor, a_elements, b_offset, b_elements))
            cursor = _aligned(b_offset + b_elements)
        return tuple(pieces), cursor


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT
