"""The fused followers' part of compile_ahead.py: each kernel as it is launched for Llama-3.1-8B."""

from collections.abc import Iterator

from kernels.follower_tuning import add_rms_norm_config, rope_config, silu_mul_config
from kernels.launch_plan import LaunchPlan
from kernels.lora_expand_add_rms_norm import add_rms_norm_row_kernel, add_rms_norm_rows_kernel
from kernels.lora_expand_rope import expand_rope_kernel
from kernels.lora_expand_silu_mul import expand_silu_mul_kernel

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
        splits = 2 if name == "one row" else 1
        silu, rope = silu_mul_config(plan, 2), rope_config(plan, 128)
        walk = {**COMMON, "SPLIT": splits, "HAS_LORA": True}
        shape = [
            {"ENTRY_ROWS": config.entry_rows, "ROWS": config.rows, "BLOCK_RANK": config.block_rank,
             "STAGES": config.num_stages}
            for config in (silu, rope)
        ]  # fmt: skip
        constants = {**walk, **shape[0], "WIDTH": 14336, "BLOCK_N": silu.block_n}
        yield f"silu_mul {name}", expand_silu_mul_kernel, constants, silu.num_warps
        constants = {**walk, **shape[1], **ROPE, "COLUMNS": rope.block_n // 2}
        yield f"rope {name}", expand_rope_kernel, constants, rope.num_warps
    yield from _norm_cases()
    plain = {
        "MAX_LORAS": 0, "MAX_RANK": 0, "SPLIT": 0, "ENTRY_ROWS": 1, "ROWS": 1, "BLOCK_RANK": 0, "STAGES": 1,
        "HAS_LORA": False,
    }  # fmt: skip
    yield "silu_mul plain", expand_silu_mul_kernel, {**plain, "WIDTH": 14336, "BLOCK_N": 1024}, 4
    yield "rope plain", expand_rope_kernel, {**plain, **ROPE, "COLUMNS": 512}, 4


def _norm_cases() -> Iterator[tuple[str, object, dict[str, object], int]]:
    row = add_rms_norm_config(PLANS["one row"], 64, 4096, 2)
    rows = add_rms_norm_config(PLANS["tiles"], 8192, 4096, 2)
    for name, config, lora in (("row", row, True), ("plain", row, False), ("rows", rows, True)):
        constants = {
            **COMMON, "HIDDEN": 4096, "SPLIT": 1, "BLOCK_RANK": config.block_rank, "BLOCK_N": config.block_n,
        }  # fmt: skip
        if config is row:
            yield f"norm {name}", add_rms_norm_row_kernel, {**constants, "HAS_LORA": lora}, config.num_warps
        else:
            constants |= {"ROWS": config.rows, "ENTRY_ROWS": 16}
            yield f"norm {name}", add_rms_norm_rows_kernel, constants, config.num_warps
