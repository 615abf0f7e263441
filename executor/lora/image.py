"""An adapter as a slot takes it: cut for this rank and cast, once; packed at its own ranks; kept by the host
tier."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adapter_store import LoRAModule
from executor.lora.errors import (
    DoRANotServed,
    ModuleNotServed,
    ModuleShapeMismatch,
    NonFiniteWeights,
    RankTooLarge,
)
from executor.lora.layout import Piece, SlotLayout, SlotSlice
from kernels.slot_block import UNIT

_Array = npt.NDArray[np.generic]
_NUMPY_DTYPES: Mapping[torch.dtype, np.dtype[np.generic]] = {
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
}


_BITS: Mapping[int, type[np.unsignedinteger[Any]]] = {2: np.uint16, 4: np.uint32}
Buffer = npt.NDArray[np.uint8]


def _allocate(nbytes: int) -> Buffer:
    return np.empty(nbytes, np.uint8)


@dataclass(frozen=True, slots=True)
class SlotImage:
    """`block`, uint8, goes to the device as it is (kernels/slot_block.py): the weights in the slots' dtype,
    packed by `SlotLayout.pack(ranks)`, and where they go. One rank and scale a slice."""

    slot_layout: str
    block: Tensor
    ranks: tuple[int, ...]
    scales: tuple[float, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory, after the cast."""
        return self.block.nbytes

    @property
    def max_rank(self) -> int:
        return max(self.ranks)


def build_slot_image(
    weights: Mapping[str, LoRAModule],
    layout: SlotLayout,
    allocate: Callable[[int], Buffer] = _allocate,
    *,
    with_dora: bool = False,
) -> SlotImage:
    """Cut, cast and pack an adapter, in memory from `allocate`, which is called once and may hold anything.
    The image holds no reference to `weights`, which may be closed afterwards.

    `with_dora`: the caller sees to the magnitudes (dora.py); otherwise one is refused as DoRANotServed.
    Raises ModuleNotServed, RankTooLarge, ModuleShapeMismatch (all before allocating), NonFiniteWeights: the
    last one on the ranks that hold the value, the others on all.
    """
    for module in weights.values():
        _check_fits(module, layout)
        if module.magnitude is not None and not with_dora:
            raise DoRANotServed(module.name)
    by_slice = [weights.get(part.module) for part in layout.slices]
    ranks = tuple(module.rank if module else 0 for module in by_slice)
    scales = tuple(float(module.scale) if module else 0.0 for module in by_slice)
    pieces, elements = layout.pack(ranks)
    block = allocate(layout.block_bytes(elements))
    split = elements * layout.dtype.itemsize
    data = block[:split].view(_NUMPY_DTYPES[layout.dtype])
    for part, served, piece in zip(layout.slices, by_slice, pieces, strict=True):
        if served:
            _fill(data, part, served, piece)
    block[split:] = _table(layout, pieces, ranks, scales).view(np.uint8)
    return SlotImage(layout.slot_layout, torch.from_numpy(block), ranks, scales)


def _table(
    layout: SlotLayout, pieces: Sequence[Piece], ranks: Sequence[int], scales: Sequence[float]
) -> npt.NDArray[np.int32]:
    """What follows the weights."""
    moves = [
        (at, to, elements)
        for piece, place in zip(pieces, layout.stripe, strict=True)
        for at, to, elements in (
            (piece.a_offset, place.a_offset, piece.a_elements),
            (piece.b_offset, place.b_offset, piece.b_elements),
        )
    ]
    # Whole units: what is copied behind a piece's end is in rows at and beyond its rank, or padding.
    in_units = -(-np.array(moves, np.int64) * layout.dtype.itemsize // (4 * UNIT))
    shrink_ranks = [part.cut.a_rows(rank) for part, rank in zip(layout.slices, ranks, strict=True)]
    tables = (in_units.ravel(), np.array(ranks), np.array(shrink_ranks))
    bits = np.array(scales, np.float32).view(np.int32)
    return np.concatenate([*(table.astype(np.int32) for table in tables), bits])


def _check_fits(module: LoRAModule, layout: SlotLayout) -> None:
    number = layout.index.get(module.name)
    if number is None:
        raise ModuleNotServed(module.name)
    if module.rank > layout.max_rank:
        raise RankTooLarge(module.name, module.rank, layout.max_rank)
    part = layout.slices[number]
    for half, array, width in (
        ("lora_a", module.lora_a, part.in_features),
        ("lora_b", module.lora_b, part.out_features),
    ):
        if array.shape != (module.rank, width):
            raise ModuleShapeMismatch(f"{module.name}.{half}", array.shape, (module.rank, width))


def _fill(data: _Array, part: SlotSlice, module: LoRAModule, piece: Piece) -> None:
    a = data[piece.a_offset : piece.a_offset + piece.a_elements].reshape(-1, part.a_width)
    share = part.cut.of_a(module.lora_a)
    _cast_into(a[: len(share)], share, f"{module.name}.lora_a")
    a[len(share) :] = 0
    b = data[piece.b_offset : piece.b_offset + piece.b_elements].reshape(module.rank, part.b_width)
    start = 0
    for columns in part.cut.of_b(module.lora_b):
        stop = start + columns.shape[1]
        _cast_into(b[:, start:stop], columns, f"{module.name}.lora_b")
        start = stop


def _cast_into(target: _Array, source: _Array, tensor: str) -> None:
    if target.dtype == source.dtype:
        # As integers: numpy copies those of any width fast, and holds no lock meanwhile.
        bits = _BITS[target.dtype.itemsize]
        np.copyto(target.view(bits), source.view(bits))
    else:
        # Overflow shows as inf below, with the tensor's name; numpy's own warning has none.
        with np.errstate(all="ignore"):
            np.copyto(target, source, casting="unsafe")
    if not _all_finite(target):
        raise NonFiniteWeights(tensor, str(source.dtype), str(target.dtype))


def _all_finite(values: _Array) -> bool:
    """Infinities and NaNs are the largest bit patterns, the sign left out."""
    bits = values.view(_BITS[values.dtype.itemsize])
    infinity = np.array(np.inf, values.dtype).view(bits.dtype)
    magnitude = np.bitwise_and(bits, np.iinfo(bits.dtype).max >> 1)
    return bool(values.size == 0 or magnitude.max() < infinity)
