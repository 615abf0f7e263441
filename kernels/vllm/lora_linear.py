"""A linear layer's shrink and expand as one operator, and with its base product as one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.launching.checks import check_same_device
from kernels.vllm.dense import reference
from kernels.vllm.dense.step import Step
from kernels.vllm.dense.work import WORK
from kernels.vllm.lora_expand import check_expand
from kernels.vllm.lora_shrink import check_shrink
from kernels.vllm.operators import register


def _add_lora_linear(
    y: Tensor,
    x: Tensor,
    lora_a_stacked: Sequence[Tensor],
    lora_b_stacked: Sequence[Tensor],
    token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor,
    num_tokens_per_lora: Tensor,
    lora_token_start_loc: Tensor,
    lora_ids: Tensor,
    no_lora_flag_cpu: Tensor,
    num_active_loras: Tensor,
    scale: float,
    add_inputs: bool = True,
    work: Tensor | None = None,
) -> None:
    """Semantics: lora_shrink of x into float32, then lora_expand into y from its first column on.

    What lies between is not written where nobody reads it, and summed where it is read. `work` is the step's
    table of `kernels.vllm.dense.work`, which saves time. Raises KernelArgumentError.
    """
    step = Step(
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc,
        lora_ids, no_lora_flag_cpu, num_active_loras,
    )  # fmt: skip
    _add(y, x, lora_a_stacked, lora_b_stacked, step, scale, add_inputs, work)


def _linear_with_lora(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a_stacked: Sequence[Tensor],
    lora_b_stacked: Sequence[Tensor],
    token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor,
    num_tokens_per_lora: Tensor,
    lora_token_start_loc: Tensor,
    lora_ids: Tensor,
    no_lora_flag_cpu: Tensor,
    num_active_loras: Tensor,
    work: Tensor | None = None,
) -> Tensor:
    """x @ weight.T + bias of x [rows, in] and weight [out, in], with `add_lora_linear` of scale 1 on it.

    `kernels.vllm.dense.layer_forms` says in which order. `token_lora_mapping` is -1 in rows behind the
    step's, as our wrapper writes it. Raises KernelArgumentError.
    """
    step = Step(
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc,
        lora_ids, no_lora_flag_cpu, num_active_loras,
    )  # fmt: skip
    if step.idle or x.is_cpu:
        y = torch.nn.functional.linear(x, weight, bias)
        _add(y, x, lora_a_stacked, lora_b_stacked, step, 1.0, True, work)
        return y
    from kernels.vllm.dense.layer_forms import best_form, product_with_lora

    y = x.new_empty((x.shape[0], weight.shape[0]))
    rows = _check_pair(y, x, lora_a_stacked, lora_b_stacked, step, work)
    whole = sum(b.shape[-2] for b in lora_b_stacked) == weight.shape[0]
    slices = len(lora_b_stacked)
    form = best_form(x, weight, has_bias=bias is not None, slices=slices) if whole else "behind"
    if rows:
        product_with_lora(y, x, weight, bias, lora_a_stacked, lora_b_stacked, step, work, form)
    return y


def _add(
    y: Tensor, x: Tensor, lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], step: Step, scale: float,
    add_inputs: bool, work: Tensor | None,
) -> None:  # fmt: skip
    if step.idle or not _check_pair(y, x, lora_a, lora_b, step, work):
        return
    if y.is_cpu:
        reference.add_pair(y, x, lora_a, lora_b, step, scale, add_inputs=add_inputs)
        return
    from kernels.vllm.dense.launches import add_pair

    add_pair(y, x, lora_a, lora_b, step, scale, add_inputs=add_inputs, work=work)


def _check_pair(
    y: Tensor, x: Tensor, lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], step: Step,
    work: Tensor | None,
) -> int:  # fmt: skip
    """The number of rows. Raises KernelArgumentError."""
    check_shrink(x, lora_a, step)
    rows = check_expand(y, lora_b, 0, step)
    pairs = len(lora_a), lora_a[0].shape[0], lora_a[0].shape[-2]
    if pairs != (len(lora_b), lora_b[0].shape[0], lora_b[0].shape[-1]):
        problem = f"does not fit lora_a_stacked's {pairs} slices, slots and ranks"
        raise KernelArgumentError("lora_b_stacked", problem)
    if work is not None:
        if work.dtype != torch.int32 or work.shape != WORK.shape or not work.is_contiguous():
            found = f"{work.dtype} {list(work.shape)}"
            raise KernelArgumentError("work", f"must be contiguous int32 {list(WORK.shape)}, is {found}")
        check_same_device(y.device, work=work)
    return rows


def _shape_of_linear(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


add_lora_linear = register("add_lora_linear", _add_lora_linear, mutates=("y",))
linear_with_lora = register("linear_with_lora", _linear_with_lora, mutates=(), fake=_shape_of_linear)
