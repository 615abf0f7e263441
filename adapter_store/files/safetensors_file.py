"""Strict reading of safetensors files that nobody vouches for: the header first, then mapped views.

Stricter than the format's own library in two ways: a key that appears twice is refused, and so is a
header beyond 8 MiB, so a hostile file costs bounded time and memory.
"""

import json
import math
import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from adapter_store.files.lfs_pointer import WHAT_IT_IS, is_pointer

# Parsed in two seconds. Pairs for each of 128 experts in 48 layers take 5 MiB, seven projections of 126 0.3.
MAX_HEADER_BYTES = 8 << 20
MAX_DIMENSIONS = 8

# Every dtype the format knows, with bytes per element: base checkpoints may hold any of them.
_ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class DamagedFile(ValueError):
    """Not well-formed safetensors; the text names file and tensor. Callers say whose fault it is."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes, absolute in the file; the data is [begin, end)
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]


def read_header(path: Path) -> Header:
    """Raises DamagedFile unless the tensors tile the rest of the file exactly. OSError passes through."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = header_length(path.name, file.read(8), size)
        return parse_header(path.name, file.read(length), size)


def header_length(file: str, start: bytes, size: int) -> int:
    """How many bytes of header follow the first 8, `start`, of a file of `size`. Raises DamagedFile."""
    if is_pointer(start):
        raise DamagedFile(f"{file} is {WHAT_IT_IS}")
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > size - 8:
        raise DamagedFile(f"{file} is cut short, or is not a safetensors file ({size} bytes)")
    if length > MAX_HEADER_BYTES:
        raise DamagedFile(f"{file}: header of {length} bytes, at most {MAX_HEADER_BYTES} are read")
    return length


def parse_header(file: str, text: bytes, size: int) -> Header:
    """`text` without the length before it; `size` of the whole file. Raises DamagedFile as read_header."""
    try:
        entries = json.loads(text.decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{file}: header is not valid JSON: {error}") from error
    if not isinstance(entries, dict):
        raise DamagedFile(f"{file}: header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DamagedFile(f"{file}: __metadata__ is not a map of strings")
    tensors = {name: _tensor_info(file, name, entry, 8 + len(text)) for name, entry in entries.items()}
    _check_tiling(file, tensors, 8 + len(text), size)
    return Header(tensors, metadata)


def open_regular(path: Path) -> BinaryIO:
    """Opens for reading in binary; anything but a regular file (a pipe would block) is DamagedFile."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise DamagedFile(f"{path.name} is not a regular file")
    return path.open("rb")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"key {name!r} appears twice")
        entries[name] = value
    return entries


def _tensor_info(file: str, name: str, entry: object, data_start: int) -> TensorInfo:
    fields = entry if isinstance(entry, dict) and len(entry) == 3 else {}
    match fields:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]}:
            numbers = [*shape, begin, end]
        case _:
            raise DamagedFile(f"{file}: tensor {name!r} needs exactly dtype, shape and data_offsets")
    if dtype not in _ITEM_BYTES:
        raise DamagedFile(f"{file}: tensor {name!r} has the unknown dtype {dtype!r}")
    # In the interpreter's own loops: a load waits for this, once for each of some thousand tensors.
    plain = set(map(type, numbers)) == {int} and min(numbers) >= 0 and max(numbers) < 2**63
    if len(shape) > MAX_DIMENSIONS or not plain:
        raise DamagedFile(f"{file}: tensor {name!r} has an impossible shape or offset")
    if end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise DamagedFile(f"{file}: tensor {name!r}: offsets {begin}..{end} do not fit {dtype} {shape}")
    return TensorInfo(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _check_tiling(file: str, tensors: Mapping[str, TensorInfo], start: int, size: int) -> None:
    position = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != position:
            raise DamagedFile(
                f"{file}: tensor {tensor.name!r} overlaps another one or leaves a hole before it"
            )
        position = tensor.end
    if position != size:
        raise DamagedFile(f"{file} holds {size} bytes where its header describes {position}")


class TensorFile:
    """A safetensors file in memory. Views are read-only and keep what they show alive by themselves."""

    def __init__(self, header: Header, content: memoryview) -> None:
        """`content`: the whole file, which `header` describes."""
        self.header = header
        self.content = content.toreadonly()

    @classmethod
    def open(cls, path: Path) -> "TensorFile":
        """Mapped. Raises DamagedFile; OSError passes through."""
        header = read_header(path)
        with open_regular(path) as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if len(content) < max((tensor.end for tensor in header.tensors.values()), default=0):
            raise DamagedFile(f"{path.name} shrank while it was being opened")
        return cls(header, content)

    @classmethod
    def in_memory(cls, file: str, content: memoryview) -> "TensorFile":
        """`content` must not change any more. Raises DamagedFile, which names it `file`."""
        end = 8 + header_length(file, bytes(content[:8]), len(content))
        return cls(parse_header(file, bytes(content[8:end]), len(content)), content)

    def array(self, name: str) -> NDArray[Any]:
        """Only for dtypes of NUMPY_DTYPES."""
        tensor = self.header.tensors[name]
        dtype = NUMPY_DTYPES[tensor.dtype]
        flat = np.frombuffer(self.content, dtype, math.prod(tensor.shape), tensor.begin)
        return flat.reshape(tensor.shape)

    def raw(self, name: str) -> memoryview:
        tensor = self.header.tensors[name]
        return self.content[tensor.begin : tensor.end]

    def __iter__(self) -> Iterator[TensorInfo]:
        return iter(self.header.tensors.values())
