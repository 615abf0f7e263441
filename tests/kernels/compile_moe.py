"""The expert kernels' part of compile_ahead.py: each as it is launched for Mixtral or Qwen3-30B-A3B."""

from collections.abc import Iterator

from kernels.block_expand import block_expand_kernel
from kernels.block_shrink import block_shrink_kernel
from kernels.fused_moe_lora_once import fused_moe_lora_once_kernel
from kernels.moe_lora_align import align_kernel, count_kernel

INTEGERS = (
    "ranks_s", "ranks_l", "ranks_e", "scales_s", "scales_l", "scales_e", "a_scale_slot", "a_scale_expert",
    "a_scale_n", "a_scale_offset1", "a_scale_offset2", "scale_slot", "scale_n0", "scale_n1", "scale_n2",
    *(f"{name}{s}" for name in ("expert_stride", "b_expert_stride", "scale_expert") for s in range(3)),
)  # fmt: skip
ARGUMENTS = {
    **{name: "*i32" for name in ("sorted_ids", "blocks", "counts", "topk_ids", "ids", "row_slots", "expert_map")},
    **{name: "*i32" for name in ("slot_rows", "lora_ids")},
    **{name: "*fp32" for name in ("routed", "h_scales", "x_scales", "a_scales")},
    **{f"b_scales{s}": "*fp32" for s in range(3)},
    **{name: "i32" for name in INTEGERS},
    "a_slot_stride": "i64", "b_slot_stride": "i64",
}  # fmt: skip
COUNTS = ("num_places", "known", "num_pairs", "num_entries")
ALIGN = {
    "TOPK": 8, "MAX_LORAS": 8, "SLOTS": 8, "NUM_EXPERTS": 128, "EXPERTS": 128, "CHUNK": 128, "HAS_LORA": True,
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
    "SPLIT": 2, "BLOCK_RANK": 16, "EARLY": True,
}  # fmt: skip
PAIRS = {"KIND": 2, "ROWS": 1}
BLOCKS = {"KIND": 1, "ROWS": 16}
TALL = {"KIND": 1, "ROWS": 64}


def moe_cases() -> Iterator[tuple[str, object, dict[str, object], int]]:
    """(name, kernel, constants, warps)."""
    yield "count", count_kernel, ALIGN, 8
    for counted in (False, True):
        yield "align", align_kernel, {**ALIGN, "BLOCK": 16, "PADDED": False, "COUNTED": counted}, 8
    for name, rows in (("pairs", PAIRS), ("blocks", BLOCKS), ("tall blocks", TALL)):
        shape = {"BLOCK_K": 512 if rows is PAIRS else 128, "FUSED": 2 if rows is TALL else 1}
        yield f"expert shrink {name}", block_shrink_kernel, {**SHRINK, **rows, **shape}, 4
        shape = {"BLOCK_N": 512 if rows is PAIRS else 256}
        yield f"expert expand {name}", block_expand_kernel, {**EXPAND, **rows, **shape}, 4
        shape = {"K": 2048, "DIVIDE": 8, "BLOCK_RANK": 16, "BLOCK_K": 128, "BLOCK_N": 256, "CHUNKS": 2}
        yield f"experts at once {name}", fused_moe_lora_once_kernel, {**COMMON, **COLUMNS, **rows, **shape}, 4
