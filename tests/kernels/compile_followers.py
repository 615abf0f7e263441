"""The fused followers' part of compile_ahead.py: each kernel as it is launched for Llama-3.1-8B."""

from collections.abc import Iterator

from kernels.launching.follower_tuning import add_rms_norm_config, rope_config, silu_mul_config
from kernels.lora_expand_add_rms_norm import add_rms_norm_kernel
from kernels.lora_expand_rope import expand_rope_kernel
from kernels.lora_expand_silu_mul import expand_silu_mul_kernel
from kernels.metadata.launch_plan import LaunchPlan

PLANS = {
    "one row": LaunchPlan(1, 16, 64, 0, False),
    "shared": LaunchPlan(16, 16, 64, 0, False),
    "tiles": LaunchPlan(16, 16, 512, 128, False),
}
COMMON = {"MAX_LORAS": 64, "MAX_RANK": 64}
ROPE = {"Q_WIDTH": 4096, "K_WIDTH": 1024, "HALF": 64, "HAS_CACHE": True}


def follower_cases() -> Iterator[tuple[str, object, dict[str, object], int]]:
    """(name, kernel, constants, warps): the configurations of 2-byte elements, and one without LoRA each."""
    for name, plan in PLANS.items():
        lora = {**COMMON, "SPLIT": 2 if name == "one row" else 1, "HAS_LORA": True}
        silu, rope = silu_mul_config(plan, 2), rope_config(plan, 128)
        shape = {"ROWS": silu.rows, "BLOCK_RANK": silu.block_rank, "BLOCK_N": silu.block_n, "WIDTH": 14336}
        if not plan.tiles:
            yield f"silu_mul {name}", expand_silu_mul_kernel, {**lora, **shape}, silu.num_warps
        shape = {"ROWS": rope.rows, "BLOCK_RANK": rope.block_rank, "COLUMNS": rope.block_n // 2, **ROPE}
        yield f"rope {name}", expand_rope_kernel, {**lora, **shape}, rope.num_warps
    norm = add_rms_norm_config(PLANS["one row"], 4096, 2)
    row = {**COMMON, "SPLIT": 2, "HIDDEN": 4096, "BLOCK_N": 4096, "BLOCK_RANK": norm.block_rank}
    yield "norm", add_rms_norm_kernel, {**row, "HAS_LORA": True}, norm.num_warps
    plain = {"MAX_LORAS": 0, "MAX_RANK": 0, "SPLIT": 0, "ROWS": 1, "BLOCK_RANK": 0, "HAS_LORA": False}
    yield "norm plain", add_rms_norm_kernel, {**row, "HAS_LORA": False}, norm.num_warps
    yield "silu_mul plain", expand_silu_mul_kernel, {**plain, "WIDTH": 14336, "BLOCK_N": 1024}, 4
    yield "rope plain", expand_rope_kernel, {**plain, **ROPE, "COLUMNS": 512}, 4
