"""Expand with FP8 weights on the GPU. The truth is kernels/reference/lora_expand_fp8.py."""

from collections.abc import Sequence

from torch import Tensor

from kernels.launching.block_launch import (
    BlockWork,
    check_arena,
    column_tiles,
    columns_side_by_side,
    slices_of,
    strides_of,
    widths_and_starts,
)
from kernels.launching.checks import check
from kernels.launching.fp8 import check_card, check_group_k, is_fp8, ranks_per_tile
from kernels.launching.launch import Launch, row_signature, signature
from kernels.launching.tuning import ExpandConfig
from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.meta import LoRAKernelMeta
from kernels.reference.lora_expand_fp8 import check_expand_fp8
from kernels.tiles.block_expand import block_expand_kernel
from kernels.tiles.device import has_dependent_launch

# From here on single rows alone fill the card.
MANY_ENTRIES = 32
# Below, columns must be few to make programs enough.
FEW_ENTRIES = 8


def lora_expand_fp8(
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    b_scales: Sequence[Tensor],
    ranks: Tensor,
    column_starts: Sequence[int],
    meta: LoRAKernelMeta,
    *,
    group_n: int = 0,
    group_k: int = 0,
    h_scales: Tensor | None = None,
    add_inputs: bool = True,
    config: ExpandConfig | None = None,
) -> None:
    """Semantics: y[row(p), start_s:start_s + out_s] += h[s, p, :r] @ (b_scales * lora_b)[s][slot, :r].

    The arguments are those of kernels/reference/lora_expand_fp8.py; besides, slices are views of one arena,
    h and ranks are contiguous, and group_k is 0 or a power of 2 from 32 up.
    h       may be [splits, slices, rows, max_rank], whose sum counts
    config  block sizes. None: the tuned ones for this step

    Without h_scales, blocks of several rows take h in y's type. On sm_90 weights, tables and metadata are
    read while the kernel before may still run. Raises KernelArgumentError; also for e4m3 below sm_89.
    """
    check_expand_fp8(y, h, lora_b, b_scales, ranks, column_starts, meta, (group_k, group_n), h_scales)
    config = config or expand_config_fp8(meta.plan)
    work = BlockWork.of_rows(meta, config.rows)
    if work.entries == 0:
        return
    rows = [None if t is None else row_signature(t) for t in (y, h, h_scales)]
    tensors = signature(*lora_b, *b_scales, ranks), tuple(rows)
    form = config, work.rows, h.shape[0] if h.dim() == 4 else 1, group_n, group_k, add_inputs
    key = ("expand_fp8", form, tuple(column_starts), tensors)
    launch: Launch | None = meta.launches.get(key)
    if launch is None:
        check_arena(lora_b, "lora_b")
        check_card(lora_b[0], "lora_b")
        check_group_k(group_k)
        check(y.stride(1) == 1, "y", f"must have contiguous rows, has strides {y.stride()}")
        for argument, tensor in (("h", h), ("ranks", ranks)):
            check(tensor.is_contiguous(), argument, f"must be contiguous, has strides {tensor.stride()}")
        group = (group_n or max(weight.shape[2] for weight in lora_b), group_k)
        launch = _launch(config, h, lora_b, b_scales, column_starts, work, group, add_inputs)
        meta.launches[key] = launch
    none = ranks
    launch(
        (column_tiles(lora_b, config.block_n), work.entries), y, h, none if h_scales is None else h_scales,
        *slices_of(lora_b), *slices_of(b_scales), ranks, none, *work.tensors, work.places, 1, y.stride(0),
        lora_b[0].stride(0), 0, 0, 0, *strides_of(lora_b, 1), ranks.stride(0), 1, 0,
        *strides_of(b_scales, 0), 0, 0, 0, *strides_of(b_scales, 1),
    )  # fmt: skip


def expand_config_fp8(plan: LaunchPlan) -> ExpandConfig:
    """Measured with gate_up of Llama-3.1-8B, rank 16, on an H100 (kernels/bench/results/lora_fp8_tune.json).

    Figures are us at (tokens, adapters).
    """
    rows, block_rank = plan.rows_per_item, plan.block_rank
    if rows == 1 and plan.items >= MANY_ENTRIES:
        # 13.3 at (64, 64), with 512 columns 13.5.
        return ExpandConfig(1, min(block_rank, 32), 1024, 4)
    if rows == 1 and plan.items < FEW_ENTRIES:
        # FP8 h: 1.14 at (1, 1), with 512 columns 1.19; 2.04 and 1.94 at (8, 1).
        return ExpandConfig(1, min(block_rank, 32), 256, 2)
    if rows == 1:
        return ExpandConfig(1, min(block_rank, 32), 512, 4)
    if plan.items < FEW_ENTRIES:
        # 3.2 at (64, 1), 7.1 with shrink; 3.4 and 9.3 with 256 columns.
        return ExpandConfig(rows, max(rows, block_rank), 64, 4)
    # 4.1 at (64, 8), 32.0 at (512, 64), 82.1 at (2048, 1); 256 columns of 4 warps 4.2, 32.7, 83.1.
    return ExpandConfig(rows, max(rows, block_rank), 512, 8)


def _launch(
    config: ExpandConfig,
    h: Tensor,
    lora_b: Sequence[Tensor],
    b_scales: Sequence[Tensor],
    column_starts: Sequence[int],
    work: BlockWork,
    group: tuple[int, int],
    add_inputs: bool,
) -> Launch:
    pdl, k_scaled = has_dependent_launch(h.device), b_scales[0].shape[1] > 1
    block_rank = ranks_per_tile(lora_b[0].shape[1]) if is_fp8(h) else config.block_rank
    constants = {
        **work.constants, **widths_and_starts(lora_b, column_starts), "SLICES": len(lora_b),
        "MAX_RANK": lora_b[0].shape[1], "SCALED": True, "K_SCALED": k_scaled, "GROUP_N": group[0],
        "GROUP_K": group[1] or 1, "W8A8": is_fp8(h), "SPLIT": h.shape[0] if h.dim() == 4 else 1,
        "BLOCK_RANK": min(block_rank, group[1]) if k_scaled else block_rank, "BLOCK_N": config.block_n,
        "VECTOR": columns_side_by_side(config.rows == 1, config.block_n, config.num_warps),
        "ADD_INPUTS": add_inputs, "ROUTED": False, "EARLY": True, "PDL": pdl,
    }  # fmt: skip
    return Launch(
        block_expand_kernel, constants, {"num_warps": config.num_warps, "num_stages": 1, "launch_pdl": pdl}
    )
