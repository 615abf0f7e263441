"""Fully trained lm_head and embed_tokens (PEFT's modules_to_save): whole matrices instead of low-rank pairs.

Each is as large as the base's own, so they have a pool of their own, beside the slots. The base's layer runs
for all rows; those of a slot with a matrix of its own are then computed anew from that.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapter_store import Weights
from executor.layers import ParallelLMHead
from executor.lora.arena import Copy
from executor.lora.errors import FullHeadNotServed, ModuleShapeMismatch
from executor.models import CausalLM
from kernels.meta import LoRAKernelMeta
from kernels.punica import PunicaWrapperBase

_Matrices = Mapping[int, Tensor]  # by slot, [vocab, hidden]


class FullHeads:
    """`number` places of one matrix each. As the arena, not synchronised.

    `tables` and `heads`: embed_tokens and lm_head of the slots that have one.
    """

    def __init__(self, model: CausalLM, number: int, punica: PunicaWrapperBase) -> None:
        """After attach_lora. From here on the model's embedding and logits heed the matrices of the slots."""
        config, weight = model.config, model.lm_head.weight
        shape = (number, config.vocab_size, config.hidden_size)
        self._places = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self._free = list(range(number))
        self._held: dict[int, list[int]] = {}
        self.tables: dict[int, Tensor] = {}
        self.heads: dict[int, Tensor] = {}
        embedding, logits = model.model.embed_tokens, model.logits_processor
        tables = EmbeddingWithTables(embedding, self.tables, punica.token_mapping_meta)
        heads = LogitsWithHeads(logits, self.heads, punica.prompt_mapping_meta)
        model.set_submodule("model.embed_tokens", tables)
        model.set_submodule("logits_processor", heads)

    @property
    def number(self) -> int:
        return len(self._places)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one matrix: [vocab, hidden]."""
        return tuple(self._places.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self._places.dtype

    @property
    def nbytes(self) -> int:
        """Of one matrix."""
        return self._places[0].nbytes

    def enter(self, slot: int, matrices: Mapping[str, Tensor]) -> list[Copy]:
        """They are the slot's from now on, and nothing of the former ones is: with the copies returned, which
        must be made before a step reads the slot. Raises RuntimeError where no place is free."""
        self.clear(slot)
        if len(matrices) > len(self._free):
            raise RuntimeError(f"slot {slot} needs {len(matrices)} full heads, {len(self._free)} are free")
        copies = []
        for name, matrix in matrices.items():
            number = self._free.pop()
            self._held.setdefault(slot, []).append(number)
            (self.heads if name == "lm_head" else self.tables)[slot] = self._places[number]
            copies.append((self._places[number], matrix))
        return copies

    def clear(self, slot: int) -> None:
        self._free += self._held.pop(slot, [])
        self.tables.pop(slot, None)
        self.heads.pop(slot, None)


def check_full_heads(weights: Weights, places: FullHeads | None) -> None:
    """Raises FullHeadNotServed for an adapter with more of them than there are places, and
    ModuleShapeMismatch for one of another size."""
    matrices, number = weights.full_heads, places.number if places else 0
    if len(matrices) > number:
        raise FullHeadNotServed(tuple(matrices), number)
    for name, matrix in matrices.items():
        if places is not None and matrix.shape != places.shape:
            raise ModuleShapeMismatch(f"{name}.weight", matrix.shape, places.shape)


class EmbeddingWithTables(nn.Module):
    """y[row] = table of the row's slot [token], where the slot has one."""

    def __init__(self, base_layer: nn.Module, tables: _Matrices, meta: LoRAKernelMeta) -> None:
        super().__init__()
        self.base_layer = base_layer
        self._tables, self._meta = tables, meta

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [rows], the step's -> [rows, hidden]."""
        y: Tensor = self.base_layer(token_ids)
        for rows, table in _rows_with(self._tables, self._meta):
            y[rows] = F.embedding(token_ids[rows], table)
        return y


class LogitsWithHeads(nn.Module):
    """logits[row] = head of the row's slot @ hidden[row], where the slot has one: a product a head."""

    def __init__(self, base_layer: nn.Module, heads: _Matrices, meta: LoRAKernelMeta) -> None:
        super().__init__()
        self.base_layer = base_layer
        self._heads, self._meta = heads, meta

    def forward(self, lm_head: ParallelLMHead, hidden: Tensor) -> Tensor:
        """hidden [n, hidden], the step's rows that reach the head -> logits float32 [n, vocab]."""
        logits: Tensor = self.base_layer(lm_head, hidden)
        for rows, head in _rows_with(self._heads, self._meta):
            logits[rows] = F.linear(hidden[rows], head).float()
        return logits


def _rows_with(matrices: _Matrices, meta: LoRAKernelMeta) -> Iterator[tuple[slice | Tensor, Tensor]]:
    """The step's rows of each slot that has a matrix, on the device: no copy, and no wait for one."""
    if not matrices:
        return
    for group in meta.groups:
        if group.slot in matrices:
            places = slice(group.start, group.start + group.count)
            listed = isinstance(group.rows, Tensor)
            yield (
                meta.token_indices_sorted_by_lora_ids[places] if listed else group.rows,
                matrices[group.slot],
            )
