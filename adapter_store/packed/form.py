"""The packed form: one neutral safetensors file, values bit-equal to the pushed ones.

Per module `{name}.lora_a` [r, in] and `{name}.lora_b` [r, out] (PEFT's B transposed, so that rank r is a
contiguous prefix of rows), and with DoRA `{name}.magnitude` [out]; of a fully trained head `{name}.weight`
[vocab, hidden]; source dtype, unscaled. The header's metadata holds rank and scale per module:
{"format": "lorafleet.packed.1", "modules": '[["layers.0.q_proj", 4, 2.0], ...]'}.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from numpy.typing import NDArray

from adapter_store.errors import DataLoss
from adapter_store.files.hashing import ParallelHashes
from adapter_store.files.safetensors_file import NUMPY_DTYPES, DamagedFile, TensorFile, TensorInfo
from adapter_store.manifest import Manifest, ModuleInfo, TextRules

FORMAT = "lorafleet.packed.1"


def content_digest(
    tensors: Iterable[tuple[str, str, tuple[int, ...], str]],  # (name, dtype, shape, bulk_hash of the data)
    modules: Iterable[ModuleInfo],
    chat_template: str | None,
    text: TextRules,
) -> str:
    """`sha256:<hex>` over everything that changes answers; names, paths and tool versions are left out.

    Alpha and the scaling kind enter as what they make: each module's rank and exact scale. Rules for text
    enter where there are any: what was stored before there were keeps its digest.
    """
    content: dict[str, Any] = {
        "tensors": sorted([name, dtype, list(shape), data] for name, dtype, shape, data in tensors),
        "modules": sorted([module.name, module.rank, module.scale.hex()] for module in modules),
        "chat_template": chat_template,
    }
    if text.end_token_ids:
        content["end_token_ids"] = text.end_token_ids
    if text.special_tokens:
        content["special_tokens"] = text.special_tokens
    told = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(told.encode()).hexdigest()


def packed_header(
    modules: Iterable[ModuleInfo], tensors: Iterable[tuple[str, str, tuple[int, ...]]]
) -> bytes:
    """The header of tensors (name, dtype, shape) in the order of their data, with its length before it."""
    ranks = [[module.name, module.rank, module.scale] for module in modules]
    entries: dict[str, Any] = {"__metadata__": {"format": FORMAT, "modules": json.dumps(ranks)}}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * NUMPY_DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class LoRAModule:
    """Read-only views, valid as long as somebody holds them; values as pushed, to be scaled by `scale`."""

    name: str
    rank: int
    scale: float
    lora_a: NDArray[Any]  # [r, in], or [experts, r, in]
    lora_b: NDArray[Any]  # [r, out], or [experts, r, out]
    magnitude: NDArray[Any] | None = None  # DoRA's, [out]


class Weights(Mapping[str, LoRAModule]):
    """One version's modules by packed name, in memory or mapped, in the order of the manifest."""

    def __init__(
        self, file: TensorFile, manifest: Manifest, hashes: Callable[[], Sequence[str]] | None
    ) -> None:
        """Raises DataLoss when the file does not hold what `manifest` and its digest say.

        `hashes`: waits for the bulk_hash of each tensor's data in the order of the file, while all else is
        checked. None takes the data on trust: for a file that this process has verified before.
        """
        self.manifest = manifest
        self._file: TensorFile | None = file
        self._modules = {module.name: module for module in manifest.modules}
        self._check_header(file)
        if hashes is not None and self._digest(file, hashes()) != manifest.digest:
            raise DataLoss(f"stored weights no longer match {manifest.digest}: push the adapter again")

    @classmethod
    def open(cls, path: Path, manifest: Manifest, *, verify: bool = True) -> "Weights":
        """Maps a packed file. Raises DataLoss."""
        try:
            file = TensorFile.open(path)
        except (DamagedFile, FileNotFoundError) as error:
            raise DataLoss(f"stored weights of {manifest.digest} are damaged: {error}") from error
        if not verify:
            return cls(file, manifest, None)
        with ParallelHashes() as hashes:
            for tensor in in_file_order(file):
                hashes.add(file.raw(tensor.name))
            return cls(file, manifest, hashes.finish)

    def write_to(self, target: BinaryIO) -> None:
        """The packed file, byte for byte."""
        if self._file is None:
            raise ValueError(f"the weights of {self.manifest.digest} are closed")
        target.write(self._file.content)

    def close(self) -> None:
        """Lets go of the file. Views handed out stay valid, and keep the memory mapped until they go."""
        self._file = None

    def __enter__(self) -> "Weights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, name: str) -> LoRAModule:
        module = self._modules[name]
        if self._file is None:
            raise ValueError(f"the weights of {self.manifest.digest} are closed")
        a, b = self._file.array(f"{name}.lora_a"), self._file.array(f"{name}.lora_b")
        magnitude = self._file.array(f"{name}.magnitude") if module.dora else None
        return LoRAModule(name, module.rank, module.scale, a, b, magnitude)

    @property
    def full_heads(self) -> dict[str, NDArray[Any]]:
        """Fully trained matrices [vocab, hidden] by name: read-only views, as those of the modules."""
        if self._file is None:
            raise ValueError(f"the weights of {self.manifest.digest} are closed")
        return {head.name: self._file.array(f"{head.name}.weight") for head in self.manifest.full_heads}

    def raw_tensors(self) -> Iterator[tuple[TensorInfo, memoryview]]:
        """All tensors with their bytes, in the order of the file."""
        if self._file is None:
            raise ValueError(f"the weights of {self.manifest.digest} are closed")
        for tensor in in_file_order(self._file):
            yield tensor, self._file.raw(tensor.name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def _check_header(self, file: TensorFile) -> None:
        modules = self.manifest.modules
        shapes = {f"{m.name}.lora_a": m.a_shape for m in modules}
        shapes |= {f"{m.name}.lora_b": m.b_shape for m in modules}
        shapes |= {f"{m.name}.magnitude": (m.out_features,) for m in modules if m.dora}
        shapes |= {f"{head.name}.weight": head.shape for head in self.manifest.full_heads}
        tensors = in_file_order(file)
        if shapes != {tensor.name: tensor.shape for tensor in tensors}:
            raise DataLoss(f"stored weights of {self.manifest.digest}: the tensors contradict the manifest")
        if any(tensor.dtype not in NUMPY_DTYPES for tensor in tensors):
            raise DataLoss(f"stored weights of {self.manifest.digest}: a tensor has no dtype of ours")
        # No byte of the header may be another one, though it means the same.
        written = packed_header(modules, ((t.name, t.dtype, t.shape) for t in tensors))
        if file.content[: len(written)] != written:
            raise DataLoss(f"stored weights of {self.manifest.digest}: the header contradicts the manifest")

    def _digest(self, file: TensorFile, hashes: Sequence[str]) -> str:
        entries = [
            (tensor.name, tensor.dtype, tensor.shape, found)
            for tensor, found in zip(in_file_order(file), hashes, strict=True)
        ]
        manifest = self.manifest
        return content_digest(entries, manifest.modules, manifest.chat_template, manifest.text)


def in_file_order(file: TensorFile) -> list[TensorInfo]:
    return sorted(file, key=lambda tensor: (tensor.begin, tensor.end))
