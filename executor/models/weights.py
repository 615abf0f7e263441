"""Loads a safetensors checkpoint into parameters, stacked (q, k, v; gate, up) and cut for this rank."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from executor.errors import BadCheckpoint
from executor.layers import LinearBase, VocabParallelEmbedding
from executor.layers.attention_sinks import AttentionSinks
from executor.layers.fused_moe import FusedMoE
from executor.layers.norm import HeadsRMSNorm
from executor.models.checkpoint import Checkpoint
from executor.models.expert_weights import expert_targets, foreign_experts
from executor.models.quantized import Scheme
from executor.start_log import start_part

# Of the frequencies, and of cosines and sines that some trainers save with everything else.
_ROTARY_BUFFERS = tuple(f".rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached"))


class Target(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...
    def pairs(self, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]: ...


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
    model: nn.Module,
    folder: Path,
    packed_modules_mapping: Mapping[str, tuple[str, ...]],
    scheme: Scheme | None = None,
) -> None:
    """Fills every parameter, each part of it exactly once, and uses every tensor of the checkpoint.

    Two kinds of tensors are not used: rotary buffers of old checkpoints, which config.json says too, and the
    copy of a tied parameter, which must be equal to it. `scheme`: how quantized weights are stored. Raises
    BadCheckpoint, naming file and tensor.
    """
    checkpoint = Checkpoint.open(folder, scheme)
    sources = checkpoint.sources
    targets = _targets(model, packed_modules_mapping, sources)
    copies = _tied_names(model, targets)
    if missing := sorted(targets.keys() - sources.keys()):
        raise BadCheckpoint(f"{folder}: {len(missing)} tensors are missing: {', '.join(missing[:5])}")
    for name in sorted(sources.keys() - targets.keys() - copies.keys() - _foreign(model)):
        if not name.endswith(_ROTARY_BUFFERS):
            raise BadCheckpoint(f"{sources[name]} has no place in this model")
    with start_part("loading weights", len(targets)) as part:
        for name, tensor in checkpoint.tensors(targets):
            for memory, piece in _pairs(name, tensor, targets[name], checkpoint):
                memory.copy_(piece)
            part.advance()
    for name, tensor in checkpoint.tensors(copies.keys() & sources.keys()):
        pairs = _pairs(name, tensor, copies[name], checkpoint)
        if not all(torch.equal(piece.to(memory), memory) for memory, piece in pairs):
            raise BadCheckpoint(f"{sources[name]} differs from the weight that config.json ties it to")


def _pairs(
    name: str, tensor: Tensor, target: Target, checkpoint: Checkpoint
) -> Iterator[tuple[Tensor, Tensor]]:
    if tuple(tensor.shape) != target.shape:
        source, wanted = checkpoint.sources[name], list(target.shape)
        raise BadCheckpoint(f"{source} is {list(tensor.shape)}, the model wants {wanted}")
    return target.pairs(tensor)


def _foreign(model: nn.Module) -> set[str]:
    """Tensors that other ranks use."""
    found: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, FusedMoE):
            found |= foreign_experts(path, module)
    return found


def _targets(
    model: nn.Module, packed_modules_mapping: Mapping[str, Sequence[str]], present: Collection[str]
) -> dict[str, Target]:
    """Checkpoint tensor name -> where it goes: a parameter, or its rows in a stacked one. `present` are the
    checkpoint's names, which tell the layout of experts."""
    targets: dict[str, Target] = {}
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
        elif isinstance(module, FusedMoE):
            targets |= expert_targets(module_name, module, present)
        elif isinstance(module, AttentionSinks):
            targets[module_name] = _Target(parameter, (module.num_heads,), (module.heads,), None)
        elif isinstance(module, HeadsRMSNorm):
            targets[name] = _Target(parameter, (module.whole_size,), (module.own_range,), None)
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


def _tied_names(model: nn.Module, targets: Mapping[str, Target]) -> dict[str, Target]:
    """Second names of parameters that have two."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: targets[first[parameter]] for name, parameter in every if name != first[parameter]}
