"""The packed form: one neutral safetensors file, values bit-equal to the pushed ones.

Per module `{name}.lora_a` [r, in] and `{name}.lora_b` [r, out] (PEFT's B transposed, so that rank r is a
contiguous prefix of rows), source dtype, unscaled. The header's metadata holds rank and scale per module:
{"format": "lorafleet.packed.1", "modules": '[["layers.0.q_proj", 4, 2.0], ...]'}.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from adapter_store.errors import DataLoss
from adapter_store.manifest import Manifest, ModuleInfo
from adapter_store.peft import PeftAdapter
from adapter_store.safetensors_file import NUMPY_DTYPES, DamagedFile, TensorFile

FORMAT = "lorafleet.packed.1"


@dataclass(frozen=True, slots=True)
class _TensorPlan:
    name: str
    module: str
    half: str  # "lora_a" | "lora_b"
    dtype: str
    shape: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * NUMPY_DTYPES[self.dtype].itemsize


def write_packed(adapter: PeftAdapter, target: BinaryIO) -> Manifest:
    """Writes tensor by tensor: memory stays at the largest single tensor. The caller syncs `target`."""
    plans = _plan(adapter)
    target.write(_header(adapter.modules, plans))
    hashes: dict[str, str] = {}
    for plan in plans:
        array = adapter.lora_a(plan.module) if plan.half == "lora_a" else adapter.lora_b(plan.module).T
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        hashes[plan.name] = hashlib.sha256(data).hexdigest()
        target.write(data)
    entries = [(plan.name, plan.dtype, plan.shape, hashes[plan.name]) for plan in plans]
    return Manifest(
        digest=content_digest(entries, adapter.modules, adapter.chat_template),
        modules=adapter.modules,
        dtypes=tuple(sorted({plan.dtype for plan in plans})),
        num_bytes=target.tell(),
        base_model=adapter.base_model,
        peft_version=adapter.peft_version,
        chat_template=adapter.chat_template,
        warnings=adapter.warnings,
    )


def content_digest(
    tensors: Iterable[tuple[str, str, tuple[int, ...], str]],  # (name, dtype, shape, sha256 of the data)
    modules: Iterable[ModuleInfo],
    chat_template: str | None,
) -> str:
    """`sha256:<hex>` over everything that changes answers; names, paths and tool versions are left out.

    Alpha and the scaling kind enter as what they make: each module's rank and exact scale.
    """
    content = {
        "tensors": sorted([name, dtype, list(shape), data] for name, dtype, shape, data in tensors),
        "modules": sorted([module.name, module.rank, module.scale.hex()] for module in modules),
        "chat_template": chat_template,
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _plan(adapter: PeftAdapter) -> list[_TensorPlan]:
    plans = []
    for module in adapter.modules:
        halves = adapter.halves[module.name]
        a, b = (module.rank, module.in_features), (module.rank, module.out_features)
        plans.append(_TensorPlan(f"{module.name}.lora_a", module.name, "lora_a", halves.a.dtype, a))
        plans.append(_TensorPlan(f"{module.name}.lora_b", module.name, "lora_b", halves.b.dtype, b))
    # Wider items first: then every tensor starts at a multiple of its item size.
    return sorted(plans, key=lambda plan: -NUMPY_DTYPES[plan.dtype].itemsize)


def _header(modules: Iterable[ModuleInfo], plans: Iterable[_TensorPlan]) -> bytes:
    ranks = [[module.name, module.rank, module.scale] for module in modules]
    entries: dict[str, Any] = {"__metadata__": {"format": FORMAT, "modules": json.dumps(ranks)}}
    offset = 0
    for plan in plans:
        end = offset + plan.num_bytes
        entries[plan.name] = {"dtype": plan.dtype, "shape": plan.shape, "data_offsets": [offset, end]}
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
    lora_a: NDArray[Any]  # [r, in]
    lora_b: NDArray[Any]  # [r, out]


class Weights(Mapping[str, LoRAModule]):
    """One version's modules by packed name, memory-mapped, in the order of the manifest."""

    def __init__(self, path: Path, manifest: Manifest, *, verify: bool = True) -> None:
        """Raises DataLoss when the file does not hold what `manifest` and its digest say.

        `verify=False` skips hashing the data, for a file that this process has verified before.
        """
        self.manifest = manifest
        try:
            self._file: TensorFile | None = TensorFile(path)
        except (DamagedFile, FileNotFoundError) as error:
            raise DataLoss(f"stored weights of {manifest.digest} are damaged: {error}") from error
        self._modules = {module.name: module for module in manifest.modules}
        self._check_header(self._file)
        if verify and self._digest(self._file) != manifest.digest:
            raise DataLoss(f"stored weights no longer match {manifest.digest}: push the adapter again")

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
        return LoRAModule(name, module.rank, module.scale, a, b)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def _check_header(self, file: TensorFile) -> None:
        ranks = [[module.name, module.rank, module.scale] for module in self.manifest.modules]
        shapes = {f"{m.name}.lora_a": (m.rank, m.in_features) for m in self.manifest.modules}
        shapes |= {f"{m.name}.lora_b": (m.rank, m.out_features) for m in self.manifest.modules}
        metadata = file.header.metadata
        if metadata.get("format") != FORMAT or metadata.get("modules") != json.dumps(ranks):
            raise DataLoss(f"stored weights of {self.manifest.digest}: the header contradicts the manifest")
        if shapes != {tensor.name: tensor.shape for tensor in file}:
            raise DataLoss(f"stored weights of {self.manifest.digest}: the tensors contradict the manifest")

    def _digest(self, file: TensorFile) -> str:
        entries = [
            (tensor.name, tensor.dtype, tensor.shape, hashlib.sha256(file.raw(tensor.name)).hexdigest())
            for tensor in file
        ]
        return content_digest(entries, self.manifest.modules, self.manifest.chat_template)
