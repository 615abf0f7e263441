"""Safetensors checkpoint -> parameters, with q, k, v and gate, up stacked on the way."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from executor.errors import BadCheckpoint
from executor.layers import LinearBase

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def load_weights(
    model: nn.Module, folder: Path, packed_modules_mapping: Mapping[str, tuple[str, ...]]
) -> None:
    """Fills every parameter, each part of it exactly once, and uses every tensor of the checkpoint.

    Two kinds of tensors are not used: rotary inv_freq buffers of old checkpoints, and the copy of a tied
    parameter, which must be equal to it. Raises BadCheckpoint, naming file and tensor.
    """
    files = _tensor_files(folder)
    targets = _targets(model, packed_modules_mapping)
    copies = _tied_names(model)
    if missing := sorted(targets.keys() - files.keys()):
        raise BadCheckpoint(f"{folder}: {len(missing)} tensors are missing: {', '.join(missing[:5])}")
    for name in sorted(files.keys() - targets.keys() - copies.keys()):
        if not name.endswith(".rotary_emb.inv_freq"):
            raise BadCheckpoint(f"{files[name]}: {name} has no place in this model")
    for name, tensor in _tensors({name: files[name] for name in targets}):
        _check(name, tensor, targets[name], files[name])
        targets[name].copy_(tensor)
    for name, tensor in _tensors({name: files[name] for name in copies.keys() & files.keys()}):
        _check(name, tensor, copies[name], files[name])
        if not torch.equal(tensor.to(copies[name]), copies[name]):
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


def _check(name: str, tensor: Tensor, target: Tensor, file: Path) -> None:
    if tensor.shape != target.shape:
        raise BadCheckpoint(f"{file}: {name} is {list(tensor.shape)}, the model wants {list(target.shape)}")
    if tensor.dtype not in _FLOATS:
        raise BadCheckpoint(f"{file}: {name} is {tensor.dtype}: quantized checkpoints are not supported")


def _targets(model: nn.Module, packed_modules_mapping: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """Checkpoint tensor name -> the memory it goes to: a parameter, or its rows in a stacked one."""
    targets: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        module_name, _, kind = name.rpartition(".")
        parent, _, leaf = module_name.rpartition(".")
        module = model.get_submodule(module_name)
        if leaf in packed_modules_mapping and isinstance(module, LinearBase):
            parts = torch.split(parameter, list(module.output_sizes))
            for part_name, part in zip(packed_modules_mapping[leaf], parts, strict=True):
                targets[f"{parent}.{part_name}.{kind}"] = part
        else:
            targets[name] = parameter
    return targets


def _tied_names(model: nn.Module) -> dict[str, Tensor]:
    """Second names of parameters that have two."""
    first = {name for name, _ in model.named_parameters()}
    return {n: p for n, p in model.named_parameters(remove_duplicate=False) if n not in first}
