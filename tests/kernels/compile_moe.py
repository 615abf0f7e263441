"""The expert kernels' part of compile_ahead.py: each as it is launched for Mixtral or Qwen3-30B-A3B."""

from collections.abc import Iterator

from kernels.fused_moe_lora_once import fused_moe_lora_once_kernel
from kernels.launching.moe_tuning import gemm_config
from kernels.lora_embedding import embedding_kernel
from kernels.moe_gemm import moe_gemm_kernel
from kernels.moe_lora_align import align_kernel, count_kernel
from kernels.tiles.block_expand import block_expand_kernel
from kernels.tiles.block_shrink import block_shrink_kernel

INTEGERS = (
    "ranks_s", "ranks_l", "ranks_e", "scales_s", "scales_l", "scales_e", "a_scale_slot", "a_scale_expert",
    "a_scale_n", "a_scale_offset1", "a_scale_offset2", "scale_k0", "scale_k1", "scale_k2",
    *(f"{name}{s}" for name in ("expert_stride", "b_expert_stride") for s in range(3)),
    *(f"{name}{s}" for name in ("scale_expert", "scale_slot") for s in range(3)),
)  # fmt: skip
INTEGER_TABLES = (
    "sorted_ids", "blocks", "counts", "topk_ids", "ids", "row_slots", "expert_map", "slot_rows", "lora_ids",
)  # fmt: skip
ARGUMENTS = {
    **dict.fromkeys(INTEGER_TABLES, "*i32"),
    **dict.fromkeys(("routed", "h_scales", "x_scales", "a_scales"), "*fp32"),
    **{f"b_scales{s}": "*fp32" for s in range(3)},
    **dict.fromkeys(INTEGERS, "i32"),
    "a_slot_stride": "i64", "b_slot_stride": "i64",
}  # fmt: skip
COUNTS = ("num_places", "known", "num_pairs", "num_entries")
ALIGN = {
    "TOPK": 8, "MAX_LORAS": 8, "SLOTS": 8, "NUM_EXPERTS": 128, "EXPERTS": 128, "GROUP": 512, "HAS_LORA": True,
    "HAS_MAP": True,
}  # fmt: skip
COMMON = {"SLICES": 2, "MAX_LORAS": 8, "NUM_EXPERTS": 128, "MAX_RANK": 16, "TOPK": 8, "HAS_MAP": False}
SHRINK = {
    **COMMON, "K": 2048, "DIVIDE": 8, "SCALED": False, "K_SCALED": False, "X_SCALED": False, "GROUP_N": 1,
    "GROUP_K": 1, "LARGEST": 0.0, "BLOCK_RANK": 16, "SPLIT": 2, "FINALISE": False, "EARLY": False,
}  # fmt: skip
COLUMNS = {
    "WIDTH0": 768, "WIDTH1": 768, "WIDTH2": 0, "START0": 0, "START1": 768, "START2": 0, "ADD_INPUTS": True,
    "ROUTED": True,
}  # fmt: skip
EXPAND = {
    **COMMON, **COLUMNS, "SCALED": False, "K_SCALED": False, "GROUP_N": 1, "GROUP_K": 1, "W8A8": False,
    "SPLIT": 2, "BLOCK_RANK": 16, "VECTOR": 16, "EARLY": True,
}  # fmt: skip
ONCE = {
    **COMMON, **COLUMNS, "K": 2048, "DIVIDE": 8, "BLOCK_RANK": 16, "BLOCK_K": 128, "BLOCK_N": 256,
    "COLUMN_STAGES": 1,
}  # fmt: skip
PAIRS = {"KIND": 2, "ROWS": 1}
BLOCKS = {"KIND": 1, "ROWS": 16}


def moe_cases() -> Iterator[tuple[str, object, dict[str, object], int]]:
    """(name, kernel, constants, warps)."""
    yield "count", count_kernel, ALIGN, 8
    for counted in (False, True):
        shape = {"CHUNK": 64, "STEP": 32, "BLOCK": 16, "PADDED": False, "COUNTED": counted}
        yield "align", align_kernel, {**ALIGN, **shape}, 8
    for name, rows in (("pairs", PAIRS), ("blocks", BLOCKS)):
        shape = {"BLOCK_K": 512 if rows is PAIRS else 128, "FUSED": 2 if rows is BLOCKS else 1}
        yield f"expert shrink {name}", block_shrink_kernel, {**SHRINK, **rows, **shape}, 4
        shape = {"BLOCK_N": 512 if rows is PAIRS else 256}
        yield f"expert expand {name}", block_expand_kernel, {**EXPAND, **rows, **shape}, 4
        yield f"experts at once {name}", fused_moe_lora_once_kernel, {**ONCE, **rows}, 4
    for size in (16, 128):
        tuned = gemm_config(size, 2)
        shape = {"ROWS": tuned.rows, "BLOCK_N": tuned.block_n, "BLOCK_K": tuned.block_k}
        flags = {"K": 2048, "N": 1536, "DIVIDE": 8, "HAS_BIAS": True, "ROUTED": True}
        yield f"expert product {size}", moe_gemm_kernel, {**flags, **shape}, tuned.num_warps


def fp8_cases(arch: int) -> Iterator[tuple[str, object, dict[str, object], int, dict[str, str]]]:
    """As moe_cases, with the types of pointers. e4m3 conversions came with sm_89."""
    rows = {"KIND": 0, "ROWS": 16, "EARLY": True, "SCALED": True, "GROUP_N": 128, "GROUP_K": 128}
    rows |= {"TOPK": 1, "NUM_EXPERTS": 1, "SPLIT": 4}
    fp8 = "fp8e4nv" if arch >= 89 else "fp8e5"
    for w8a8 in (False, True):
        quantized = {"LARGEST": 448.0, "BLOCK_RANK": 32} if w8a8 else {}
        types = {"a": f"*{fp8}", "x": f"*{fp8}" if w8a8 else "*bf16", "h": f"*{fp8}" if w8a8 else "*fp32"}
        flags = {"K_SCALED": True, "X_SCALED": w8a8, "FUSED": 1, "BLOCK_K": 128, "FINALISE": True}
        name = f"{fp8} x {fp8}" if w8a8 else fp8
        shrink = {**SHRINK, **rows, **flags, **quantized, "DIVIDE": 1}
        yield f"shrink {name}", block_shrink_kernel, shrink, 4, types
        types |= {f"b{s}": f"*{fp8}" for s in range(3)} | {"y": "*bf16"}
        rank = {"BLOCK_RANK": 32} if w8a8 else {}
        expand = {**EXPAND, **rows, **rank, "SPLIT": 1, "W8A8": w8a8, "BLOCK_N": 256, "ROUTED": False}
        yield f"expand {name}", block_expand_kernel, expand, 4, types
    gather = {"MAX_LORAS": 64, "MAX_RANK": 64, "ROWS": 16, "BLOCK_RANK": 16}
    yield f"embedding {fp8}", embedding_kernel, gather, 2, {"a": f"*{fp8}"}
    of_adapters = block_shrink_kernel, block_expand_kernel, fused_moe_lora_once_kernel
    # Conversions are those above; on one card, for time.
    for name, kernel, constants, warps in moe_cases() if arch >= 90 else ():
        if kernel in of_adapters:
            types = {"a": f"*{fp8}"} | {f"b{s}": f"*{fp8}" for s in range(3)}
            yield f"{name} {fp8}", kernel, constants, warps, types
