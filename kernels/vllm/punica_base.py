"""PunicaWrapperBase as vLLM has it: a step's indices, and what a wrapper does for the layers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.vllm.step_buffers import Field, StepBuffers
from kernels.vllm.step_slots import LoRAMapping, StepSlots, index_fields, write_indices

Shared = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""What w13 hands to w2: sorted token ids, expert ids, padded counts, and the rows' slots."""

# What vLLM's layers pass, always as True, and mean as `add_inputs`.
SWALLOWED = ("add_input",)


class PunicaWrapperBase(ABC):
    """A step's indices, refilled by `update_metadata` at addresses that stay; int64 on the device.

    Weights are A [max_loras, 1, rank, in] and B [max_loras, 1, out, rank], one tensor a slice. Every `add_`
    method changes its first argument in place and leaves rows without an adapter as they are.
    """

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        self.device = device
        self._buffers = StepBuffers(self._fields(max_num_batched_tokens), device)
        tensors = self._buffers.tensors
        self._token_lora_indices = tensors["token_lora_indices"]
        self._sampler_indices = tensors["sampler_indices"]
        self._sampler_indices_padded = tensors["sampler_indices_padded"]
        self._embeddings_indices = tensors["embeddings_indices"]
        # The lengths of the four above, in this order.
        self.indices_len: list[int | None] = [None] * 4
        self._seq_start_locs = torch.empty(max_batches, dtype=torch.long, device=device)
        self._seq_lengths = torch.empty(max_batches, dtype=torch.long, device=device)
        self._lora_indices_per_batch = torch.empty(max_batches, dtype=torch.long, device=device)
        self.max_length = 0
        self.token_nums = 0
        self.batch_size = -1
        self.is_prefill = False
        self.no_lora = False

    def _fields(self, max_num_batched_tokens: int) -> dict[str, Field]:
        """What the one copy of a step holds: more in wrappers whose kernels read more."""
        return index_fields(max_num_batched_tokens)

    def _slots_of(self, mapping: LoRAMapping, lora_index_to_id: list[int | None]) -> StepSlots:
        return StepSlots.of(mapping, lora_index_to_id, len(self._token_lora_indices))

    def _set_lengths(self, step: StepSlots) -> None:
        rows, prompts = len(step.rows), len(step.prompts)
        self.indices_len[:] = [rows, prompts, prompts, rows]

    def _update_base_metadata(
        self, mapping: LoRAMapping, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int
    ) -> None:
        step = self._slots_of(mapping, lora_index_to_id)
        write_indices(self._buffers.begin(), step, max_loras, vocab_size)
        self._buffers.send()
        self._set_lengths(step)

    def _update_prefill_metadata(self, token_lora_tensor: Tensor) -> None:
        """Set `prefill_metadata` from the rows' slots. Neighbours of one slot count as one sequence."""
        slots, lengths = torch.unique_consecutive(token_lora_tensor, return_counts=True)
        self.batch_size, self.token_nums = len(slots), len(token_lora_tensor)
        self.max_length = int(lengths.max()) if len(lengths) else 0
        self.no_lora = bool((slots == -1).all())
        self._seq_start_locs[: self.batch_size] = lengths.cumsum(0) - lengths
        self._seq_lengths[: self.batch_size] = lengths
        self._lora_indices_per_batch[: self.batch_size] = slots

    @property
    def prefill_metadata(self) -> tuple[Tensor, Tensor, Tensor, int, int, int]:
        """The sequences' starts, lengths and slots, int64 [sequences]; their number, longest, all rows."""
        size = self.batch_size
        return (
            self._seq_start_locs[:size],
            self._seq_lengths[:size],
            self._lora_indices_per_batch[:size],
            size,
            self.max_length,
            self.token_nums,
        )

    @property
    def token_lora_indices(self) -> Tensor:
        """The slot of each row, -1 for none: int64 [rows]."""
        return self._token_lora_indices[: self.indices_len[0]]

    @property
    def sampler_indices(self) -> Tensor:
        """The slot of each row that reaches the head, -1 for none: int64 [prompts]."""
        return self._sampler_indices[: self.indices_len[1]]

    @property
    def sampler_indices_padded(self) -> Tensor:
        """`row + slot * prompts` of each row that reaches the head: int64 [prompts]."""
        return self._sampler_indices_padded[: self.indices_len[2]]

    @property
    def embeddings_indices(self) -> Tensor:
        """What to add to a row's token id in the base's and in A's stack of vocabularies: int64 [2, rows]."""
        return self._embeddings_indices[:, : self.indices_len[3]]

    def update_metadata(
        self,
        mapping: LoRAMapping,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        """Describe the next step, before the model runs.

        Raises KernelArgumentError, with the last step's description untouched, for more rows than the buffers
        hold, or an adapter that is in no slot of `lora_index_to_id`.
        """
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        if mapping.is_prefill:
            self._update_prefill_metadata(self.token_lora_indices)
        self.is_prefill = mapping.is_prefill

    def apply_lora_full_linear(
        self, y: Tensor, x: Tensor, weight_stacked: Tensor, bias_stacked: Tensor, module_enabled: Tensor
    ) -> None:
        """y[row] = x[row] @ W[slot].T + b[slot] over the rows that reach the head, where the slot is enabled.

        y is [prompts, labels], W [max_loras, 1, labels, in], b [max_loras, labels] and `module_enabled` bool
        [max_loras]: a classifier that an adapter brings whole. Other rows stay. A GPU is not waited for.
        """
        x, prompts = x.view(-1, x.shape[-1]), self.indices_len[1]
        if len(y) != prompts or len(x) != prompts:
            raise KernelArgumentError("y", f"has {len(y)} rows, x {len(x)}, and {prompts} reach the head")
        if y.shape[1] != weight_stacked.shape[-2]:
            problem = f"has {weight_stacked.shape[-2]} labels, y {y.shape[1]}"
            raise KernelArgumentError("weight_stacked", problem)
        for slot, weight in enumerate(weight_stacked.flatten(0, 1)):
            mine = (self.sampler_indices == slot) & module_enabled[slot]
            whole = (x.float() @ weight.float().T).to(y.dtype) + bias_stacked[slot].to(y.dtype)
            y.copy_(torch.where(mine.unsqueeze(1), whole, y))

    @abstractmethod
    def add_shrink(
        self,
        y: tuple[Tensor, ...] | Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        scale: float,
        **kwargs: Any,
    ) -> None:
        """y[s][row] = x[row] @ A_s[slot].T * scale, for each slice s."""

    @abstractmethod
    def add_expand(
        self,
        y: Tensor,
        x: tuple[Tensor, ...] | Tensor,
        lora_b_stacked: tuple[Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """y[row, start_s : start_s + output_slices[s]] += x[s][row] @ B_s[slot].T, slices side by side."""

    @abstractmethod
    def add_lora_embedding(
        self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """y[row] += x[row] @ B[slot].T, where x is what the layer looked up in A."""

    @abstractmethod
    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """`add_shrink` and `add_expand` of one layer."""

    @abstractmethod
    def add_lora_logits(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Tensor,
        lora_b_stacked: Tensor,
        scale: float,
        *,
        buffer: Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """y[row] += (x[row] @ A[slot].T * scale) @ B[slot].T over the rows that reach the head."""


def check_options(options: dict[str, Any]) -> None:
    """Refuse keyword arguments that nobody reads. Raises KernelArgumentError."""
    for name, value in options.items():
        if name not in SWALLOWED or value is not True:
            raise KernelArgumentError(name, f"is {value!r}, which this method does not know")


def check_slices(lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], output_slices: Sequence[int]) -> None:
    """One size, one A and one B a slice. Raises KernelArgumentError."""
    if not len(lora_a) == len(lora_b) == len(output_slices):
        numbers = f"{len(lora_a)} of A, {len(lora_b)} of B"
        raise KernelArgumentError("output_slices", f"names {len(output_slices)} slices for {numbers}")
