"""An adapter as a slot takes it: cut for this rank, cast, and packed at its own ranks.

It is made once; the host tier keeps it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
from executor.lora.expert_modules import as_layout_has_them, rank_first
from executor.lora.layout import Piece, SlotLayout, SlotSlice
from executor.lora.quantize import Quantized, quantize_into
from kernels.launching.slot_block import UNIT

_Array = npt.NDArray[np.generic]
NUMPY_DTYPES: Mapping[torch.dtype, np.dtype[np.generic]] = {
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
}


# By bytes of an element: its bits as a number with and without a sign.
_BITS: Mapping[int, tuple[np.dtype[np.integer[Any]], np.dtype[np.integer[Any]]]] = {
    2: (np.dtype(np.int16), np.dtype(np.uint16)),
    4: (np.dtype(np.int32), np.dtype(np.uint32)),
}
_CHECKED_AT_ONCE = 1 << 20  # elements: what a core's cache holds between two passes
Buffer = npt.NDArray[np.uint8]


def _allocate(nbytes: int) -> Buffer:
    return np.empty(nbytes, np.uint8)


@dataclass(frozen=True, slots=True)
class SlotImage:
    """`block`, uint8, goes to the device as it is (kernels/launching/slot_block.py): the weights in the
    slots' dtype, packed by `SlotLayout.pack(ranks)`, and where they go. One rank and scale a slice. `error`:
    the largest of a factor's relative errors where slots are FP8, else 0."""

    slot_layout: str
    block: Tensor
    ranks: tuple[int, ...]
    scales: tuple[float, ...]
    error: float = 0.0

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
    weights = as_layout_has_them(weights, layout)
    for module in weights.values():
        _check_fits(module, layout)
        if module.magnitude is not None and not with_dora:
            raise DoRANotServed(module.name)
    by_slice = [weights.get(part.module) for part in layout.slices]
    ranks = tuple(module.rank if module else 0 for module in by_slice)
    scales = [float(module.scale) if module else 0.0 for module in by_slice]
    pieces, elements = layout.pack(ranks)
    block = allocate(layout.block_bytes(elements))
    split = elements * layout.dtype.itemsize
    data = block[:split].view(NUMPY_DTYPES[layout.dtype])
    error = 0.0
    for number, (part, served, piece) in enumerate(zip(layout.slices, by_slice, pieces, strict=True)):
        if served:
            quantized = _fill(data, part, served, piece)
            scales[number] = _product(scales[number], quantized.scale, served, layout)
            error = max(error, quantized.error)
    # In one go, as each tensor costs two turns of the interpreter. Bytes between the pieces may be anything.
    if layout.dtype.itemsize > 1 and not _all_finite(data):
        _check_finite(data, layout, by_slice, pieces)
    block[split:] = _table(layout, pieces, ranks, scales).view(np.uint8)
    return SlotImage(layout.slot_layout, torch.from_numpy(block), ranks, tuple(scales), error)


def _product(own: float, factors: float, module: LoRAModule, layout: SlotLayout) -> float:
    """Raises NonFiniteWeights where it is too large for a float32."""
    with np.errstate(over="ignore"):
        scale = float(np.float32(own * factors))
    if not np.isfinite(scale):
        raise NonFiniteWeights(f"{module.name}.scale", "float32", f"{layout.dtype} slots keep it")
    return scale


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
        stack = (part.num_experts,) if part.num_experts else ()
        if array.shape != (*stack, module.rank, width):
            raise ModuleShapeMismatch(f"{module.name}.{half}", array.shape, (*stack, module.rank, width))


def _fill(data: _Array, part: SlotSlice, module: LoRAModule, piece: Piece) -> Quantized:
    """Says what the module's scale is to be multiplied with, and how far off its factors are. Raises
    NonFiniteWeights where slots are FP8; else who calls it checks what is filled in."""
    a, b = _factors(data, part, module, piece)
    share = part.cut.of_a(rank_first(module.lora_a))
    left = _cast_into([a[: len(share)]], [share], f"{module.name}.lora_a")
    a[len(share) :] = 0
    columns = part.cut.of_b(rank_first(module.lora_b))
    stops = list(accumulate(each.shape[-1] for each in columns))
    places = [b[..., stop - each.shape[-1] : stop] for each, stop in zip(columns, stops, strict=True)]
    right = _cast_into(places, columns, f"{module.name}.lora_b")
    return Quantized(left.scale * right.scale, max(left.error, right.error))


def _factors(data: _Array, part: SlotSlice, module: LoRAModule, piece: Piece) -> tuple[_Array, _Array]:
    """Where this rank's shares of A and B lie, rank first."""
    stack = (part.row_experts,) if part.num_experts else ()
    a = data[piece.a_offset : piece.a_offset + piece.a_elements]
    b = data[piece.b_offset : piece.b_offset + piece.b_elements]
    return (
        a.reshape(-1, *stack, part.a_width // part.row_experts),
        b.reshape(module.rank, *stack, part.b_width // part.row_experts),
    )


def _check_finite(
    data: _Array, layout: SlotLayout, by_slice: Sequence[LoRAModule | None], pieces: Sequence[Piece]
) -> None:
    """Raises NonFiniteWeights, naming the tensor."""
    for part, served, piece in zip(layout.slices, by_slice, pieces, strict=True):
        if served:
            for half, factor in zip(("lora_a", "lora_b"), _factors(data, part, served, piece), strict=True):
                if not _all_finite(factor):
                    source = str(getattr(served, half).dtype)
                    raise NonFiniteWeights(f"{served.name}.{half}", source, str(data.dtype))


def _cast_into(targets: Sequence[_Array], sources: Sequence[_Array], tensor: str) -> Quantized:
    if targets[0].dtype.itemsize == 1:
        quantized = quantize_into(targets, sources)
        if not np.isfinite(quantized.scale):
            raise NonFiniteWeights(tensor, str(sources[0].dtype), str(targets[0].dtype))
        return quantized
    for target, source in zip(targets, sources, strict=True):
        _cast(target, source)
    return Quantized(1.0, 0.0)


def copy_into(target: _Array, source: _Array, tensor: str) -> None:
    """Copies, with a cast where dtypes differ. Raises NonFiniteWeights, naming `tensor`."""
    _cast(target, source)
    if not _all_finite(target):
        raise NonFiniteWeights(tensor, str(source.dtype), str(target.dtype))


def _cast(target: _Array, source: _Array) -> None:
    if target.dtype != source.dtype:
        # Overflow shows as inf when it is checked, with the tensor's name; numpy's own warning has none.
        with np.errstate(all="ignore"):
            np.copyto(target, source, casting="unsafe")
        return
    # As integers: numpy copies those of any width fast, and holds no lock meanwhile.
    _, bits = _BITS[target.dtype.itemsize]
    np.copyto(target.view(bits), source.view(bits))


def _all_finite(values: _Array) -> bool:
    """Infinities and NaNs are the largest bit patterns of their sign."""
    signed, unsigned = _BITS[values.dtype.itemsize]
    infinity = np.array(np.inf, values.dtype).view(signed)
    negative = np.array(-np.inf, values.dtype).view(unsigned)
    flat = values.reshape(-1)
    for start in range(0, flat.size, _CHECKED_AT_ONCE):
        some = flat[start : start + _CHECKED_AT_ONCE]
        if some.view(signed).max() >= infinity or some.view(unsigned).max() >= negative:
            return False
    return True
