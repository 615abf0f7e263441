"""Packs a PEFT adapter: writes its tensors in the packed form (form.py says what that is)."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from adapter_store.files.cores import on_all_cores
from adapter_store.files.finite import check_finite
from adapter_store.files.hashing import ParallelHashes, bulk_hash
from adapter_store.files.memory import memory
from adapter_store.files.safetensors_file import NUMPY_DTYPES, TensorInfo
from adapter_store.manifest import Manifest, TextRules
from adapter_store.packed.form import content_digest, packed_header
from adapter_store.peft.folder import PeftAdapter
from adapter_store.peft.stacked import StackedHalf


@dataclass(frozen=True, slots=True)
class _Part:
    """One packed tensor, and where its values are in the pushed file."""

    name: str
    shape: tuple[int, ...]
    source: TensorInfo | StackedHalf
    transposed: bool = False

    @property
    def dtype(self) -> str:
        return self.source.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize

    @property
    def tensors(self) -> Iterable[TensorInfo]:
        return self.source.tensors.values() if isinstance(self.source, StackedHalf) else (self.source,)


class Packing:
    """One adapter, to be packed as often as need be. Values that are NaN or infinity are refused on the way
    out, as InvalidAdapter: while Redis takes what was sent before, looking at them costs nothing."""

    def __init__(self, adapter: PeftAdapter, digest: str | None = None) -> None:
        """`digest`: what it is to be, if it can: rules for text are left out where only that makes it so, as
        before there were any."""
        self._digest = digest
        self._adapter, self._parts = adapter, _parts(adapter)
        self._kept: Mapping[str, memoryview] = {}  # what was transposed, by name
        self._header = packed_header(adapter.modules, ((p.name, p.dtype, p.shape) for p in self._parts))

    @property
    def num_bytes(self) -> int:
        return len(self._header) + sum(part.num_bytes for part in self._parts)

    def check(self) -> None:
        """The values, of what is not to be packed. Raises InvalidAdapter."""
        on_all_cores(self._check, self._parts)

    def manifest(self, *, keep: bool = False) -> Manifest:
        """Hashes everything, without writing it or looking at values. `keep`: what is transposed for that,
        half of the packed file, stays in memory for `pieces`."""
        room = self._room() if keep else {}
        hashes = on_all_cores(lambda part: bulk_hash(self._data(part, room)), self._parts)
        self._kept = room
        return self._manifest(hashes)

    def write(self, target: BinaryIO) -> Manifest:
        """Writes the packed file. The caller syncs `target`. Raises InvalidAdapter."""
        self.check()
        target.write(self._header)
        with ParallelHashes() as hashes:
            for part in self._parts:
                data = self._data(part)
                hashes.add(data)
                target.write(data)
            return self._manifest(hashes.finish())

    def pieces(self) -> Iterator[memoryview]:
        """The packed file in pieces, of at most a tensor each; transposed ones are made on the way.

        Raises InvalidAdapter.
        """
        yield memoryview(self._header)
        for part in self._parts:
            self._check(part)
            yield self._kept[part.name] if part.name in self._kept else self._data(part)

    def _check(self, part: _Part) -> None:
        check_finite(self._adapter.file, part.tensors)

    def _room(self) -> dict[str, memoryview]:
        """One piece of memory for all: fresh pages for each of them cost more than what is done there."""
        parts = [part for part in self._parts if part.transposed]
        area, room = memory(sum(part.num_bytes for part in parts)), {}
        for part in parts:
            room[part.name], area = area[: part.num_bytes], area[part.num_bytes :]
        return room

    def _data(self, part: _Part, room: Mapping[str, memoryview] | None = None) -> memoryview:
        """`room`: where transposed ones go, by name, if they are not to have their own memory."""
        file = self._adapter.file
        if isinstance(part.source, StackedHalf):
            return part.source.packed(file)
        if not part.transposed:
            return file.raw(part.source.name)
        bits = file.array(part.source.name).view(f"u{NUMPY_DTYPES[part.dtype].itemsize}")
        if not room:
            return np.ascontiguousarray(bits.T).reshape(-1).view(np.uint8).data
        target = room[part.name]
        np.frombuffer(target, bits.dtype).reshape(part.shape)[:] = bits.T
        return target

    def _manifest(self, hashes: Sequence[str]) -> Manifest:
        adapter, parts = self._adapter, self._parts
        entries = [(p.name, p.dtype, p.shape, found) for p, found in zip(parts, hashes, strict=True)]
        rules = [adapter.text, TextRules()]
        digests = [content_digest(entries, adapter.modules, adapter.chat_template, each) for each in rules]
        chosen = digests.index(self._digest) if self._digest in digests else 0
        return Manifest(
            digest=digests[chosen],
            modules=adapter.modules,
            dtypes=tuple(sorted({part.dtype for part in parts})),
            num_bytes=self.num_bytes,
            chat_template=adapter.chat_template,
            full_heads=adapter.full_heads,
            text=rules[chosen],
        )


def _parts(adapter: PeftAdapter) -> list[_Part]:
    parts = []
    for module in adapter.modules:
        if (stack := adapter.experts.get(module.name)) is not None:
            parts.append(_Part(f"{module.name}.lora_a", module.a_shape, stack.a))
            parts.append(_Part(f"{module.name}.lora_b", module.b_shape, stack.b))
            continue
        halves = adapter.halves[module.name]
        a, b = (module.rank, module.in_features), (module.rank, module.out_features)
        parts.append(_Part(f"{module.name}.lora_a", a, halves.a, transposed=False))
        parts.append(_Part(f"{module.name}.lora_b", b, halves.b, transposed=True))
        if halves.magnitude is not None:
            shape = (module.out_features,)
            parts.append(_Part(f"{module.name}.magnitude", shape, halves.magnitude, transposed=False))
    for head in adapter.full_heads:
        parts.append(_Part(f"{head.name}.weight", head.shape, adapter.head_tensors[head.name]))
    # Wider items first: then every tensor starts at a multiple of its item size.
    return sorted(parts, key=lambda part: -NUMPY_DTYPES[part.dtype].itemsize)
