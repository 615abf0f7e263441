"""Shrink and expand of one layer with FP8 weights on the GPU, h between them in float32."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.checks import check
from kernels.launch_plan import LaunchPlan
from kernels.lora_expand_fp8 import FEW_ENTRIES, lora_expand_fp8
from kernels.lora_shrink_fp8 import lora_shrink_fp8, shrink_config_fp8
from kernels.meta import LoRAKernelMeta
from kernels.tuning import ExpandConfig

# From here on the pair does best with as many columns as expand alone.
_MANY_ENTRIES = 128


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
    config = config or _expand_config(meta.plan)
    lora_expand_fp8(y, h, lora_b, b_scales, ranks, column_starts, meta, config=config)


def _expand_config(plan: LaunchPlan) -> ExpandConfig | None:
    """None: as expand alone. On an H200 (kernels/bench/results/lora_fp8_tune.json) gate_up's pair takes
    9.5 us at (64, 8) and 37.2 at (512, 64) with 128 columns, 10.5 and 38.2 with the 256 that expand alone
    likes; 81.4 and 80.4 at (2048, 1)."""
    if plan.rows_per_item == 1 or not FEW_ENTRIES <= plan.items < _MANY_ENTRIES:
        return None
    return ExpandConfig(plan.rows_per_item, max(plan.rows_per_item, plan.block_rank), 128, 4)
