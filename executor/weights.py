"""Safetensors checkpoint -> parameters, stacked (q, k, v and gate, up) and cut for this rank on the way."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from executor.errors import BadCheckpoint
from executor.layers import LinearBase, VocabParallelEmbedding

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a checkpoint tensor goes: these ranges of its rows, one under the other, and these columns."""

    memory: Tensor
    shape: tuple[int, ...]  # of the whole tensor
    rows: tuple[range, ...]
    columns: range | None  # None: it has only rows

    def pairs(self, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(memory, what belongs there): views that together are all of the memory."""
        start = 0
        for rows in self.rows:
            piece = tensor[rows.start : rows.stop]
            if self.columns is not None:
                piece = piece[:, self.columns.start : self.columns.stop]
            yield self.memory[start : start + len(rows)], piece
            start += len(rows)


def load_weights(
    model: nn.Module, folder: Path, packed_modules_mapping: Mapping[str, tuple[str, ...]]
) -> None:
    """Fills every parameter, each part of it exactly once, and uses every tensor of the checkpoint.

    Two kinds of tensors are not used: rotary inv_freq buffers of old checkpoints, and the copy of a tied
    parameter, which must be equal to it. Raises BadCheckpoint, naming file and tensor.
    """
    files = _tensor_files(folder)
    targets = _targets(model, packed_modules_mapping)
    copies = _tied_names(model, targets)
    if missing := sorted(targets.keys() - files.keys()):
        raise BadCheckpoint(f"{folder}: {len(missing)} tensors are missing: {', '.join(missing[:5])}")
    for name in sorted(files.keys() - targets.keys() - copies.keys()):
        if not name.endswith(".rotary_emb.inv_freq"):
            raise BadCheckpoint(f"{files[name]}: {name} has no place in this model")
    for name, tensor in _tensors({name: files[name] for name in targets}):
        _check(name, tensor, targets[name], files[name])
        for memory, piece in targets[name].pairs(tensor):
            memory.copy_(piece)
    for name, tensor in _tensors({name: files[name] for name in copies.keys() & files.keys()}):
        _check(name, tensor, copies[name], files[name])
        if not all(torch.equal(piece.to(memory), memory) for memory, piece in copies[name].pairs(tensor)):
            raise BadCheckpoint(f"{files[name]}: {name} differs from the weight that config.json ties it to")


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> its file. As in transformers, a single file wins over an index."""
    single, index = folder / _SINGLE_FILE, folder / _INDEX_FILE
    if single.exists():
        return dict.fromkeys(_names(single), single)
    if not index.exists():
        raise BadCheckpoint(f"{folder} has neither {_SINGLE_FILE} nor {_INDEX_FILE}")
    listed = _read_index(index)
    for file in set(listed.values()):
        if here := sorted({name for name, home in listed.items() if home == file} ^ _names(file)):
            raise BadCheckpoint(f"{index} and {file} disagree about {here[0]}")
    return listed


def _read_index(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        listed = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadCheckpoint(f"cannot read weight_map of {index}: {error!r}") from error
    for name, file in listed.items():
        if Path(file).name != file:
            raise BadCheckpoint(f"{index}: {name} points at {file!r}, which is not a plain file name")
    return {name: index.parent / file for name, file in listed.items()}


def _names(file: Path) -> set[str]:
    try:
        with safe_open(file, framework="pt") as handle:
            return set(handle.keys())
    except (OSError, SafetensorError) as error:
        raise BadCheckpoint(f"cannot read {file}: {error}") from error


def _tensors(files: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors, file by file, memory-mapped."""
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as handle:
            for name in sorted(name for name, home in files.items() if home == file):
                yield name, handle.get_tensor(name)


def _check(name: str, tensor: Tensor, target: _Target, file: Path) -> None:
    if tuple(tensor.shape) != target.shape:
        raise BadCheckpoint(f"{file}: {name} is {list(tensor.shape)}, the model wants {list(target.shape)}")
    if tensor.dtype not in _FLOATS:
        raise BadCheckpoint(f"{file}: {name} is {tensor.dtype}: quantized checkpoints are not supported")


def _targets(model: nn.Module, packed_modules_mapping: Mapping[str, Sequence[str]]) -> dict[str, _Target]:
    """Checkpoint tensor name -> where it goes: a parameter, or its rows in a stacked one."""
    targets: dict[str, _Target] = {}
    for name, parameter in model.named_parameters():
        module_name, _, kind = name.rpartition(".")
        parent, _, leaf = module_name.rpartition(".")
        module = model.get_submodule(module_name)
        if isinstance(module, LinearBase):
            names = packed_modules_mapping.get(leaf, (leaf,))
            targets |= {
                f"{parent}.{part_name}.{kind}": target
                for part_name, target in zip(names, _stacked(module, parameter, len(names)), strict=True)
            }
        elif isinstance(module, VocabParallelEmbedding):
            shape, columns = (module.num_embeddings, module.embedding_dim), range(module.embedding_dim)
            targets[name] = _Target(parameter, shape, (module.vocab_range,), columns)
        else:
            targets[name] = _Target(parameter, tuple(parameter.shape), (range(len(parameter)),), None)
    return targets


def _stacked(module: LinearBase, parameter: Tensor, tensors: int) -> Iterator[_Target]:
    """One target for each tensor that is stacked in a linear layer's weight or bias."""
    parts = module.parts_behind(tensors)
    if parts is None:
        raise ValueError(f"{tensors} names for a layer of {len(module.output_sizes)} parts")
    start = 0
    for numbers in parts:
        rows = module.rows_in_tensor(numbers)
        width, height = sum(map(len, rows)), sum(module.output_sizes[number] for number in numbers)
        memory = parameter[start : start + width]
        if parameter.dim() == 1:
            yield _Target(memory, (height,), rows, None)
        else:
            yield _Target(memory, (height, module.input_size), rows, module.input_range)
        start += width


def _tied_names(model: nn.Module, targets: Mapping[str, _Target]) -> dict[str, _Target]:
    """Second names of parameters that have two."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: targets[first[parameter]] for name, parameter in every if name != first[parameter]}
