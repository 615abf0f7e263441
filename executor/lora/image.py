"""An adapter as a slot takes it: cut for this rank and cast, once; packed at its own ranks; kept by the host
tier."""

from collections.abc import Mapping
from dataclasses import dataclass

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

_Array = npt.NDArray[np.generic]
_NUMPY_DTYPES: Mapping[torch.dtype, np.dtype[np.generic]] = {
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class SlotImage:
    """data [elements] in the slots' dtype, packed by `SlotLayout.pack(ranks)`; one rank and scale a slice."""

    slot_layout: str
    data: Tensor
    ranks: tuple[int, ...]
    scales: tuple[float, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory, after the cast."""
        return self.data.nbytes


def build_slot_image(
    weights: Mapping[str, LoRAModule], layout: SlotLayout, *, with_dora: bool = False
) -> SlotImage:
    """Cut, cast and pack an adapter. It holds no reference to `weights`, which may be closed afterwards.

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
    pieces, elements = layout.pack(ranks)
    data = np.zeros(elements, _NUMPY_DTYPES[layout.dtype])
    for part, served, piece in zip(layout.slices, by_slice, pieces, strict=True):
        if served:
            _fill(data, part, served, piece)
    scales = tuple(float(module.scale) if module else 0.0 for module in by_slice)
    return SlotImage(layout.slot_layout, _as_tensor(data, layout.dtype), ranks, scales)


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
    b = data[piece.b_offset : piece.b_offset + piece.b_elements].reshape(module.rank, part.b_width)
    start = 0
    for columns in part.cut.of_b(module.lora_b):
        stop = start + columns.shape[1]
        _cast_into(b[:, start:stop], columns, f"{module.name}.lora_b")
        start = stop


def _cast_into(target: _Array, source: _Array, tensor: str) -> None:
    # Overflow shows as inf below, with the tensor's name; numpy's own warning has none.
    with np.errstate(all="ignore"):
        np.copyto(target, source, casting="unsafe")
    if not np.isfinite(target).all():
        raise NonFiniteWeights(tensor, str(source.dtype), str(target.dtype))


def _as_tensor(data: _Array, dtype: torch.dtype) -> Tensor:
    """The same memory as a tensor; torch knows no ml_dtypes, so bfloat16 goes over as raw 16-bit integers."""
    if dtype == torch.bfloat16:
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(data)
