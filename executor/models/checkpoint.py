"""A checkpoint folder's tensors by the names of our modules, whatever file or family they come from."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from adapter_store.base.checkpoint import read_tensors
from executor.errors import BadCheckpoint
from executor.models.quantized import Scheme

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Where families call the same module by another name.
_SYNONYMS = (
    (".block_sparse_moe.", ".mlp."),
    (".mlp.gate.", ".mlp.router."),
)


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of a file, under the name that the file has for it; with another one if it is quantized."""

    file: Path
    name: str
    scales: "Source | None" = None

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    sources: Mapping[str, Source]  # by our name
    scheme: Scheme | None

    @classmethod
    def open(cls, folder: Path, scheme: Scheme | None = None) -> "Checkpoint":
        """Reads names only. Raises InvalidModel or BadCheckpoint, naming file and tensor."""
        sources: dict[str, Source] = {}
        files = {name: tensor.file for name, tensor in read_tensors(folder).items()}
        for name, source in _weights(files, scheme).items():
            own = _own_name(name)
            if own in sources:
                raise BadCheckpoint(f"{source} and {sources[own].name} mean the same tensor")
            sources[own] = source
        return cls(sources, scheme)

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The named ones, file by file: memory-mapped, or dequantized. Raises BadCheckpoint for what is
        neither floats nor of the scheme."""
        by_file: dict[Path, list[str]] = {}
        for name in sorted(names):
            by_file.setdefault(self.sources[name].file, []).append(name)
        for file in sorted(by_file):
            with safe_open(file, framework="pt") as handle:
                for name in by_file[file]:
                    source = self.sources[name]
                    yield name, self._decoded(handle.get_tensor(source.name), source)

    def _decoded(self, tensor: Tensor, source: Source) -> Tensor:
        if self.scheme is not None and source.scales is not None:
            with safe_open(source.scales.file, framework="pt") as handle:
                scales = handle.get_tensor(source.scales.name)
            try:
                return self.scheme.decode(tensor, scales)
            except ValueError as error:
                raise BadCheckpoint(f"{source} {error}") from error
        if tensor.dtype not in _FLOATS:
            raise BadCheckpoint(f"{source} is {tensor.dtype}: no quantization of config.json explains that")
        return tensor


def _weights(files: Mapping[str, Path], scheme: Scheme | None) -> dict[str, Source]:
    """Each weight's source, by the weight's name."""
    sources = {name: Source(file, name) for name, file in files.items()}
    if scheme is None:
        return sources
    for name, values, scales in list(scheme.pairs(files)):
        joined = Source(files[values], values, Source(files[scales], scales))
        del sources[values], sources[scales]
        sources[name] = joined
    return {name: source for name, source in sources.items() if not scheme.unused(name)}


def _own_name(name: str) -> str:
    for other, own in _SYNONYMS:
        name = name.replace(other, own)
    return name
