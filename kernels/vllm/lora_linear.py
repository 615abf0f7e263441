"""A linear layer's shrink and expand as one operator, which vLLM's wrapper calls in place of two."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.launching.checks import check, check_same_device
from kernels.vllm.dense import reference
from kernels.vllm.dense.beside import fork_of, pays
from kernels.vllm.dense.step import Step
from kernels.vllm.dense.work import MOST_SINGLE_ROWS
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
    mark: Tensor | None = None,
) -> None:
    """Semantics: lora_shrink of x into float32, then lora_expand into y from its first column on.

    What lies between is not written where nobody reads it, and summed where it is read. `work` is the step's
    table of `kernels.vllm.dense.work`, which saves time. With the `mark` of `mark_input(x)` shrink does not
    wait for what came after it. Raises KernelArgumentError.
    """
    step = Step(
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc,
        lora_ids, no_lora_flag_cpu, num_active_loras,
    )  # fmt: skip
    check_shrink(x, lora_a_stacked, step)
    rows = check_expand(y, lora_b_stacked, 0, step)
    pairs = len(lora_a_stacked), lora_a_stacked[0].shape[0], lora_a_stacked[0].shape[-2]
    fits = pairs == (len(lora_b_stacked), lora_b_stacked[0].shape[0], lora_b_stacked[0].shape[-1])
    check(fits, "lora_b_stacked", f"does not fit lora_a_stacked's {pairs} slices, slots and ranks")
    if step.idle or not rows:
        return
    if y.is_cpu:
        reference.add_pair(y, x, lora_a_stacked, lora_b_stacked, step, scale, add_inputs=add_inputs)
        return
    from kernels.vllm.dense.launches import add_pair

    if work is not None:
        fits = work.dtype == torch.int32 and work.shape == (5, MOST_SINGLE_ROWS) and work.is_contiguous()
        check(fits, "work", f"must be contiguous int32 [5, {MOST_SINGLE_ROWS}], is {list(work.shape)}")
        check_same_device(y.device, work=work)
    fork = fork_of(x.device) if mark is not None and pays(rows) else None
    add_pair(y, x, lora_a_stacked, lora_b_stacked, step, scale, add_inputs=add_inputs, work=work, fork=fork)


add_lora_linear = register("add_lora_linear", _add_lora_linear, mutates=("y",))
