"""PunicaWrapperCPU as vLLM has it, in plain torch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.vllm.punica_base import PunicaWrapperBase, check_options, check_slices


class PunicaWrapperCPU(PunicaWrapperBase):
    """The reference's constructor and methods, for prefill and decode alike.

    Rows without an adapter stay as they are, where the reference gives them the last slot's. Products are
    summed up in float32 and rounded once. Every slot is multiplied and chosen from, so no shape depends on
    the step and a compiler traces it whole; what a slot holds reaches no other slot's rows.
    """

    def add_shrink(
        self,
        y: tuple[Tensor, ...] | Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        scale: float,
        **kwargs: Any,
    ) -> None:
        """y[s][row] = x[row] @ A_s[slot].T * scale, 0 for base rows; y is float32 [rows, rank] a slice."""
        check_options(kwargs)
        x = x.view(-1, x.shape[-1])
        for slice_y, lora_a in zip(y, lora_a_stacked, strict=True):
            self._shrink(slice_y, x, lora_a, scale, self._token_lora_indices)

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
        """y[row, start_s : start_s + output_slices[s]] += x[s][row] @ B_s[slot].T, slices side by side.

        With `add_inputs` False the columns of rows that have an adapter are written, not added to.
        """
        check_options(kwargs)
        y, start = y.view(-1, y.shape[-1]), offset_start
        for slice_x, lora_b, width in zip(x, lora_b_stacked, output_slices, strict=True):
            if lora_b.shape[-2] != width or start + width > y.shape[1]:
                problem = f"names {width} columns from {start}, of {lora_b.shape[-2]} in B, {y.shape[1]} in y"
                raise KernelArgumentError("output_slices", problem)
            self._expand(y[:, start : start + width], slice_x, lora_b, add_inputs, self._token_lora_indices)
            start += width

    def add_lora_embedding(
        self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """y[row] += x[row] @ B[slot].T, where x [rows, rank] is what the layer looked up in A."""
        check_options(kwargs)
        self._expand(y, x, lora_b_stacked, add_inputs, self._token_lora_indices)

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
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """`add_shrink` and `add_expand` of one layer, by way of `buffer`, one [rows, rank] a slice."""
        check_options(kwargs)
        check_slices(lora_a_stacked, lora_b_stacked, output_slices)
        x = x.view(-1, x.shape[-1])
        hidden = _hidden(x, lora_b_stacked) if buffer is None else buffer
        self.add_shrink(hidden, x, lora_a_stacked, scale)
        self.add_expand(y, hidden, lora_b_stacked, output_slices, add_inputs=add_inputs)

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
        check_options(kwargs)
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        hidden = _hidden(x, (lora_b_stacked,))[0] if buffer is None else buffer
        self._shrink(hidden, x, lora_a_stacked, scale, self._sampler_indices)
        self._expand(y, hidden, lora_b_stacked, True, self._sampler_indices)

    def _shrink(self, y: Tensor, x: Tensor, lora_a: Tensor, scale: float, indices: Tensor) -> None:
        total = torch.zeros(x.shape[0], lora_a.shape[-2], dtype=torch.float32, device=x.device)
        for slot, mine in _by_slot(lora_a, indices[: x.shape[0]]):
            total = torch.where(mine, x.float() @ slot.float().T, total)
        y[:, : total.shape[1]] = total * scale

    def _expand(self, y: Tensor, x: Tensor, lora_b: Tensor, add_inputs: bool, indices: Tensor) -> None:
        # A head may be padded further than B, or B than the head.
        width = min(y.shape[1], lora_b.shape[-2])
        y = y[:, :width]
        for slot, mine in _by_slot(lora_b, indices[: x.shape[0]]):
            delta = x.float() @ slot[:width].float().T
            y.copy_(torch.where(mine, delta + y.float() if add_inputs else delta, y.float()))


def _by_slot(stacked: Tensor, indices: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each slot's weights [out, in], and which rows are its own, [rows, 1]."""
    weights = stacked.view(stacked.shape[0], *stacked.shape[-2:])
    return [(weights[slot], (indices == slot).unsqueeze(1)) for slot in range(len(weights))]


def _hidden(x: Tensor, lora_b: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(x.shape[0], b.shape[-1], dtype=torch.float32, device=x.device) for b in lora_b)
