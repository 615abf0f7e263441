"""PunicaWrapperGPU as vLLM has it, over our kernels: what its layers call in place of its own."""

from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.vllm.dense.layer_step import take_over
from kernels.vllm.dense.work import WORK, write_work
from kernels.vllm.expert_lora import ExpertLoRA
from kernels.vllm.kernel_meta import LoRAKernelMeta, group_tokens, meta_fields
from kernels.vllm.lora_expand import lora_expand
from kernels.vllm.lora_linear import add_lora_linear, linear_with_lora
from kernels.vllm.lora_shrink import lora_shrink
from kernels.vllm.punica_base import PunicaWrapperBase, check_options, check_slices
from kernels.vllm.step_buffers import Field
from kernels.vllm.step_slots import LoRAMapping, write_indices

_ROWS, _PROMPTS = "rows.", "prompts."


class LoRAConfig(Protocol):
    """What is read of vLLM's class of that name."""

    max_loras: int
    max_lora_rank: int
    specialize_active_lora: bool


def captured_lora_counts(max_loras: int, specialize: bool) -> list[int]:
    """The numbers of groups that vLLM captures graphs for: powers of two and all, or all alone."""
    most = max_loras + 1
    return sorted({1 << bit for bit in range(most.bit_length())} | {most}) if specialize else [most]


class PunicaWrapperGPU(ExpertLoRA, PunicaWrapperBase):
    """The reference's constructor and methods. `lora_config` is a keyword argument that must be given.

    `token_mapping_meta` describes a step's rows and `prompt_mapping_meta` those that reach the head. Both are
    refilled in `update_metadata` with the indices of the base class: in one copy from pinned memory, from
    what the mapping says on the host, without waiting for the device.
    """

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        if "lora_config" not in kwargs:
            raise KernelArgumentError("lora_config", "is missing: max_loras is read of it")
        self.lora_config: LoRAConfig = kwargs["lora_config"]
        self.max_loras = self.lora_config.max_loras
        super().__init__(max_num_batched_tokens, max_batches, device)
        captured = captured_lora_counts(self.max_loras, self.lora_config.specialize_active_lora)
        tensors = self._buffers.tensors
        self.token_mapping_meta = LoRAKernelMeta.over(tensors, captured, _ROWS)
        self.prompt_mapping_meta = LoRAKernelMeta.over(tensors, captured, _PROMPTS)
        self._row_work, self._prompt_work = tensors[_ROWS + "work"], tensors[_PROMPTS + "work"]
        self._row_work.zero_()
        self._prompt_work.zero_()
        take_over()

    def _fields(self, max_num_batched_tokens: int) -> dict[str, Field]:
        # Prompt log-probabilities and speculation can send every row of a step to the head.
        size = self.max_loras, max_num_batched_tokens
        metas = meta_fields(*size, _ROWS) | meta_fields(*size, _PROMPTS)
        work = {_ROWS + "work": WORK, _PROMPTS + "work": WORK}
        return metas | work | super()._fields(max_num_batched_tokens)

    def update_metadata(
        self,
        mapping: LoRAMapping,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        """Describe the next step, before the model runs, in the current stream's order.

        Raises KernelArgumentError, with the last step's description untouched, for more rows than the buffers
        hold, an adapter that is in no slot of `lora_index_to_id`, or a slot beyond the configured ones.
        """
        step = self._slots_of(mapping, lora_index_to_id)
        size = self.max_loras, len(self._token_lora_indices)
        rows, prompts = group_tokens(step.rows, *size), group_tokens(step.prompts, *size)
        host = self._buffers.begin()
        write_indices(host, step, max_loras, vocab_size)
        for groups, prefix in ((rows, _ROWS), (prompts, _PROMPTS)):
            groups.write(host, prefix)
            rank = self.lora_config.max_lora_rank
            write_work(host[prefix + "work"], groups, rank)
        self._buffers.send()
        self._set_lengths(step)
        self.token_mapping_meta.set_counts(rows)
        self.prompt_mapping_meta.set_counts(prompts)
        self.is_prefill = mapping.is_prefill

    def add_shrink(  # type: ignore[override]  # the reference narrows y here, too
        self, y: Tensor, x: Tensor, lora_a_stacked: tuple[Tensor, ...], scale: float, **kwargs: Any
    ) -> None:
        """y[s, row] = x[row] @ A_s[slot].T * scale; y is float32 [slices, rows, rank], 0 for base rows."""
        check_options(kwargs)
        x = x.view(-1, x.shape[-1])
        meta = self.token_mapping_meta.meta_args(x.size(0), self.lora_config.specialize_active_lora)
        lora_shrink(x, lora_a_stacked, y, *meta, scale)

    def add_expand(  # type: ignore[override]  # the reference narrows x here, too
        self,
        y: Tensor,
        x: Tensor,
        lora_b_stacked: tuple[Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """y[row, start_s : start_s + output_slices[s]] += x[s, row] @ B_s[slot].T, slices side by side.

        With `add_inputs` False the columns of rows that have an adapter are written, not added to; those of
        other rows stay as they are, so a caller that runs this beside the base's product passes zeros.
        """
        check_options(kwargs)
        if x.ndim != 3 or x.size(0) != len(output_slices):
            raise KernelArgumentError("x", f"must be [{len(output_slices)}, rows, rank], is {list(x.shape)}")
        meta = self.token_mapping_meta.meta_args(x.size(1), self.lora_config.specialize_active_lora)
        y = y.view(-1, y.shape[-1])
        lora_expand(x, lora_b_stacked, y, *meta, offset_start=offset_start, add_inputs=add_inputs)

    def add_lora_embedding(
        self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """y[row] += x[row] @ B[slot].T, where x [rows, rank] is what the layer looked up in A."""
        check_options(kwargs)
        meta = self.token_mapping_meta.meta_args(x.size(0), self.lora_config.specialize_active_lora)
        lora_expand(x.unsqueeze(0), (lora_b_stacked,), y, *meta, offset_start=0, add_inputs=add_inputs)

    def add_lora_linear(  # type: ignore[override]  # the reference narrows buffer here, too
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: Tensor | None = None,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """`add_shrink` and `add_expand` of one layer. A `buffer` is refused: it is made here."""
        check_options(kwargs)
        check_slices(lora_a_stacked, lora_b_stacked, output_slices)
        _refuse_buffer(buffer)
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        meta = self.token_mapping_meta.meta_args(x.size(0), self.lora_config.specialize_active_lora)
        add_lora_linear(y, x, lora_a_stacked, lora_b_stacked, *meta, scale, add_inputs, self._row_work)

    def linear_with_lora(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        output_slices: tuple[int, ...],
    ) -> Tensor:
        """x @ weight.T + bias with `add_lora_linear` of scale 1 on it: what vLLM's layers ask for with
        `kernels.vllm.dense.layer_step`."""
        check_slices(lora_a_stacked, lora_b_stacked, output_slices)
        meta = self.token_mapping_meta.meta_args(x.size(0), self.lora_config.specialize_active_lora)
        both: Tensor = linear_with_lora(
            x, weight, bias, lora_a_stacked, lora_b_stacked, *meta, self._row_work
        )
        return both

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
        """y[row] += (x[row] @ A[slot].T * scale) @ B[slot].T over the rows that reach the head.

        A `buffer` is refused: it is made here.
        """
        check_options(kwargs)
        _refuse_buffer(buffer)
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        meta = self.prompt_mapping_meta.meta_args(x.size(0), self.lora_config.specialize_active_lora)
        add_lora_linear(y, x, (lora_a_stacked,), (lora_b_stacked,), *meta, scale, True, self._prompt_work)


class PunicaWrapperGPU33(PunicaWrapperGPU):
    """For vLLM 0.33, whose embedding layer reads one row of offsets, int64 [rows], in place of two."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self._embeddings_indices = self._embeddings_indices[1]

    @property
    def embeddings_indices(self) -> Tensor:
        """What to add to a row's token id in A's stack of vocabularies: int64 [rows]."""
        return self._embeddings_indices[: self.indices_len[3]]


def _refuse_buffer(buffer: Tensor | None) -> None:
    if buffer is not None:
        raise KernelArgumentError("buffer", "must not be passed: the wrapper makes it")
