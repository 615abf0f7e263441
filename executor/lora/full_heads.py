"""Fully trained lm_head and embed_tokens (PEFT's modules_to_save): whole matrices beside the slots.

Each is as large as the base's own, so they have a pool of their own, beside the slots. The base's layer runs
for all rows; those of a slot with a matrix of its own are then computed anew from that. Embedding is part of
captured steps, so the device knows whose rows they are; the head comes after them, and the host chooses.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapter_store import Weights
from executor.layers import LogitsProcessor, ParallelLMHead
from executor.lora.arena import TensorCopy
from executor.lora.errors import FullHeadNotServed, ModuleShapeMismatch
from executor.lora.layers import LogitsProcessorWithLoRA
from executor.lora.slot_marks import SlotMarks
from executor.models import CausalLM
from kernels.metadata.meta import LoRAKernelMeta
from kernels.punica import PunicaWrapperBase


class FullHeads:
    """`number` places of one matrix each. As the arena, not synchronised.

    `tables`: the slots with an embed_tokens of their own, and the number of its place. `heads`: the lm_head
    of the slots that have one.
    """

    def __init__(self, model: CausalLM, number: int, punica: PunicaWrapperBase) -> None:
        """After attach_lora. From here on the model's embedding and logits heed the matrices of the slots."""
        config, weight = model.config, model.lm_head.weight
        shape = (number, config.vocab_size, config.hidden_size)
        self._places = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self._free = list(range(number))
        self._held: dict[int, list[int]] = {}
        self.tables = SlotMarks(punica.max_loras, number, weight.device)
        self.heads: dict[int, Tensor] = {}
        embedding, logits = model.model.embed_tokens, model.logits_processor
        tables = EmbeddingWithTables(embedding, self._places, self.tables, punica.token_mapping_meta)
        heads = LogitsWithHeads(logits, self.heads, punica.prompt_mapping_meta)
        model.set_submodule("model.embed_tokens", tables)
        model.set_submodule("logits_processor", heads)

    @property
    def number(self) -> int:
        return len(self._places)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one matrix: [vocab, hidden]."""
        return tuple(self._places.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self._places.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of one matrix."""
        return self._places[0].nbytes

    def enter(self, slot: int, matrices: Mapping[str, Tensor]) -> list[TensorCopy]:
        """They are the slot's from now on, and nothing of the former ones is: with the copies returned, which
        must be made before a step reads the slot. Raises RuntimeError where no place is free."""
        free = len(self._free) + len(self._held.get(slot, ()))
        if len(matrices) > free:
            raise RuntimeError(f"slot {slot} needs {len(matrices)} full heads, {free} are free")
        copies = self.clear(slot)
        for name, matrix in matrices.items():
            number = self._free.pop()
            self._held.setdefault(slot, []).append(number)
            copies.append((self._places[number], matrix))
            if name == "lm_head":
                self.heads[slot] = self._places[number]
            else:
                copies += self.tables.put(slot, number)
        return copies

    def clear(self, slot: int) -> list[TensorCopy]:
        """Does what `enter` does, without matrices."""
        self._free += self._held.pop(slot, [])
        self.heads.pop(slot, None)
        return self.tables.put(slot, -1)


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

    def __init__(
        self, base_layer: nn.Module, places: Tensor, tables: SlotMarks, meta: LoRAKernelMeta
    ) -> None:
        """`tables`: which of `places` [number, vocab, hidden] is a slot's."""
        super().__init__()
        self.base_layer = base_layer
        self._places, self._tables, self._meta = places, tables, meta

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [rows], the step's -> [rows, hidden]."""
        y: Tensor = self.base_layer(token_ids)
        if not self._tables.concern(self._meta):
            return y
        # Slot -1 finds the last entry, which marks nothing.
        numbers = self._tables.on_device[self._meta.token_lora_mapping[: len(token_ids)]]
        vocab = self._places.shape[1]
        own = F.embedding(numbers.clamp(min=0) * vocab + token_ids, self._places.flatten(0, 1))
        return torch.where((numbers >= 0)[:, None], own, y)


class LogitsWithHeads(nn.Module):
    """logits[row] = head of the row's slot @ hidden[row], where the slot has one: a product a head, finished
    as the base's."""

    def __init__(
        self,
        base_layer: LogitsProcessor | LogitsProcessorWithLoRA,
        heads: Mapping[int, Tensor],
        meta: LoRAKernelMeta,
    ) -> None:
        """`heads` [vocab, hidden], by slot."""
        super().__init__()
        self.base_layer = base_layer
        self._heads, self._meta = heads, meta

    def forward(self, lm_head: ParallelLMHead, hidden: Tensor) -> Tensor:
        """hidden [n, hidden], the step's rows that reach the head -> logits float32 [n, vocab]."""
        logits: Tensor = self.base_layer(lm_head, hidden)
        for rows, head in self._own_heads():
            logits[rows] = self.base_layer.finish(F.linear(hidden[rows], head).float())
        return logits

    def _own_heads(self) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """The step's rows of each slot that has a head, on the device: no copy, and no wait for one."""
        for group in self._meta.groups if self._heads else ():
            if group.slot in self._heads:
                places = slice(group.start, group.start + group.count)
                listed = isinstance(group.rows, Tensor)
                rows = self._meta.token_indices_sorted_by_lora_ids[places] if listed else group.rows
                yield rows, self._heads[group.slot]
