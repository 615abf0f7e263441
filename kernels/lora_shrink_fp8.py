"""Shrink with FP8 weights on the GPU. The truth is kernels/reference/lora_shrink_fp8.py."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
from torch import Tensor

from kernels.launching.block_launch import BlockWork, check_arena, offsets
from kernels.launching.checks import check
from kernels.launching.fp8 import LARGEST, check_card, check_group_k, is_fp8, ranks_per_tile
from kernels.launching.launch import Launch, row_signature, signature
from kernels.launching.tuning import SOME_ENTRIES, ShrinkConfig, shrink_config
from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.meta import LoRAKernelMeta
from kernels.reference.lora_shrink_fp8 import check_shrink_fp8
from kernels.tiles.block_shrink import block_shrink_kernel
from kernels.tiles.device import has_dependent_launch


def lora_shrink_fp8(
    h: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    a_scales: Sequence[Tensor],
    ranks: Tensor,
    scales: Tensor,
    meta: LoRAKernelMeta,
    *,
    group_n: int = 0,
    group_k: int = 0,
    x_scales: Tensor | None = None,
    h_scales: Tensor | None = None,
    config: ShrinkConfig | None = None,
) -> None:
    """Semantics: h[s, p, :r] = scales[s, slot] * (x[row(p)] @ (a_scales * lora_a)[s][slot, :r].T).

    The arguments are those of kernels/reference/lora_shrink_fp8.py; besides, slices are views of one arena,
    h and the tables are contiguous, and group_k is 0 or a power of 2 from 32 up.
    h       may be float32 [splits, slices, rows, max_rank]: h.sum(0) is the result, for lora_expand_fp8
    config  block sizes; h's splits must be its splits. None: the tuned ones for this step

    Quantizing h costs no launch: who finishes a row's sum quantizes it. Repeated launches give equal bits. On
    sm_90 weights, tables and metadata are read while the kernel before may still run. Raises
    KernelArgumentError; also for e4m3 below sm_89.
    """
    check_shrink_fp8(h, x, lora_a, a_scales, ranks, scales, meta, (group_n, group_k), x_scales, h_scales)
    slices, width = len(lora_a), x.shape[1]
    config = config or shrink_config_fp8(meta.plan, slices, width, x.element_size(), final=h.dim() == 3)
    splits = 1 if config.final else config.split
    given = h.shape[0] if h.dim() == 4 else 1
    check(given == splits, "h", f"holds {given} splits, the config makes {splits}")
    work = BlockWork.of_rows(meta, config.rows)
    if work.entries == 0:
        return
    rows = [None if t is None else row_signature(t) for t in (x, h, x_scales, h_scales)]
    strides = *offsets(lora_a), *offsets(a_scales)
    tensors = signature(*lora_a, *a_scales, ranks, scales), strides, tuple(rows)
    key = ("shrink_fp8", config, work.rows, group_n, group_k, tensors)
    launch: Launch | None = meta.launches.get(key)
    if launch is None:
        check_arena(lora_a, "lora_a")
        check_card(lora_a[0], "lora_a")
        check_group_k(group_k)
        check(x.stride(1) == 1, "x", f"must have contiguous rows, has strides {x.stride()}")
        for argument, tensor in (("h", h), ("ranks", ranks), ("scales", scales)):
            check(tensor.is_contiguous(), argument, f"must be contiguous, has strides {tensor.stride()}")
        launch = meta.launches[key] = _launch(
            config, h, x, lora_a, a_scales, work, (group_n, group_k), x_scales
        )
    partials = h
    if config.final and config.split > 1:
        partials = torch.empty((config.split, *h.shape), dtype=torch.float32, device=h.device)
    x_strides = (0, 0) if x_scales is None else (x_scales.stride(0), int(x_scales.shape[1] > 1))
    launch(
        (config.split, 1 if config.fused else slices, work.entries), h,
        scales if h_scales is None else h_scales, partials, x,
        scales if x_scales is None else x_scales, lora_a[0], a_scales[0], ranks, scales,
        *work.tensors, meta.finished_splits, work.places, 1, x.stride(0), lora_a[0].stride(0), 0,
        lora_a[0].stride(1), *offsets(lora_a), ranks.stride(0), 1, 0, scales.stride(0), 1, 0, *x_strides,
        a_scales[0].stride(0), 0, a_scales[0].stride(1), *offsets(a_scales),
    )  # fmt: skip


def shrink_config_fp8(
    plan: LaunchPlan, slices: int, width: int, element_size: int, *, final: bool = False
) -> ShrinkConfig:
    """The same as tuning.shrink_config, with shorter steps where rows share a tile: its A is converted on the
    way to the matrix instructions.

    gate_up's pair on an H200: 7.1 us at (64, 1), with 512 inputs a step 7.6; 78.2 at (2048, 1), with 128
    80.3; bfloat16 7.3 and 78.0. Longer ones pay where there are more entries: 9.1 at (64, 8), with 128 inputs
    9.3; 37.2 at (512, 64) and 40.0.
    """
    config = shrink_config(plan, slices, width, element_size, final=final)
    if config.fused:
        return replace(config, block_k=min(config.block_k, 64))
    if config.rows > 1 and plan.items < SOME_ENTRIES:
        return replace(config, block_k=min(config.block_k, 128), num_stages=3)
    return config


def _launch(
    config: ShrinkConfig,
    h: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    a_scales: Sequence[Tensor],
    work: BlockWork,
    group: tuple[int, int],
    x_scales: Tensor | None,
) -> Launch:
    slices, pdl = len(lora_a), has_dependent_launch(x.device)
    k_scaled = a_scales[0].shape[2] > 1
    # A step of K lies within one group of inputs, a tile of ranks is one group of h.
    block_k = min(config.block_k, group[1]) if k_scaled else config.block_k
    constants = {
        **work.constants, "SLICES": slices, "MAX_RANK": lora_a[0].shape[1], "K": x.shape[1], "DIVIDE": 1,
        "SCALED": True, "K_SCALED": k_scaled, "X_SCALED": x_scales is not None,
        "GROUP_N": group[0] or lora_a[0].shape[1], "GROUP_K": group[1] or x.shape[1],
        "LARGEST": LARGEST[h.dtype] if is_fp8(h) else 0.0,
        "FUSED": triton.next_power_of_2(slices) if config.fused else 1,
        "BLOCK_RANK": ranks_per_tile(lora_a[0].shape[1]) if is_fp8(h) else config.block_rank,
        "BLOCK_K": block_k, "SPLIT": config.split, "FINALISE": config.final and config.split > 1,
        "EARLY": True, "PDL": pdl,
    }  # fmt: skip
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": pdl}
    return Launch(block_shrink_kernel, constants, options)
