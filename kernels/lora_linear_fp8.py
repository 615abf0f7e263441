"""Shrink and expand of one layer with FP8 weights on the GPU, h between them in float32."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.launching.checks import check
from kernels.launching.tuning import ExpandConfig
from kernels.lora_expand_fp8 import FEW_ENTRIES, MANY_ENTRIES, expand_config_fp8, lora_expand_fp8
from kernels.lora_shrink_fp8 import lora_shrink_fp8, shrink_config_fp8
from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.meta import LoRAKernelMeta


def add_pair_fp8(
    y: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    a_scales: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    b_scales: Sequence[Tensor],
    ranks: Tensor,
    scales: Tensor,
    column_starts: Sequence[int],
    meta: LoRAKernelMeta,
    *,
    config: ExpandConfig | None = None,
) -> None:
    """y[row, start_s : start_s + out_s] += (scale * x[row] @ A_s[slot, :r].T) @ B_s[slot, :r].

    As lora_shrink_fp8 and lora_expand_fp8, with their checks and one scale a tensor; few splits of shrink are
    added up by expand. config: of expand. Raises KernelArgumentError.
    """
    fits = len(lora_a) > 0 and lora_a[0].dim() == 3 and x.dim() == 2
    check(fits, "lora_a", "must hold slices [max_loras, max_rank, in], and x be [rows, in]")
    shrink = shrink_config_fp8(meta.plan, len(lora_a), x.shape[1], x.element_size())
    splits = () if shrink.final else (shrink.split,)
    shape = (*splits, len(lora_a), len(x), lora_a[0].shape[1])
    h = torch.empty(shape, dtype=torch.float32, device=x.device)
    lora_shrink_fp8(h, x, lora_a, a_scales, ranks, scales, meta, config=shrink)
    config = config or pair_expand_config_fp8(meta.plan)
    lora_expand_fp8(y, h, lora_b, b_scales, ranks, column_starts, meta, config=config)


def pair_expand_config_fp8(plan: LaunchPlan) -> ExpandConfig:
    """Expand's behind shrink. On an H100 (kernels/bench/results/lora_fp8_tune.json) gate_up's pair takes 10.5
    us at (64, 8) and 44.4 at (512, 64) with 128 columns, 11.4 and 41.3 with the 512 of expand alone."""
    if plan.rows_per_item == 1 or not FEW_ENTRIES <= plan.items < MANY_ENTRIES:
        return expand_config_fp8(plan)
    return ExpandConfig(plan.rows_per_item, max(plan.rows_per_item, plan.block_rank), 128, 4)
