"""The part of compile_ahead.py of vLLM's dense operations: each as for Llama-3.1-8B."""

from collections.abc import Iterator

from kernels.vllm.dense.delta_kernel import add_delta_kernel
from kernels.vllm.dense.expand_kernel import expand_members_kernel, expand_tiles_kernel
from kernels.vllm.dense.fp8_kernel import expand_fp8_kernel, shrink_fp8_kernel
from kernels.vllm.dense.product_kernel import product_kernel
from kernels.vllm.dense.shrink_kernel import shrink_members_kernel, shrink_tiles_kernel

TYPES = {
    "counts": "*i32", "starts": "*i32", "lora_ids": "*i32", "work": "*i32", "scale": "fp32",
    "mapping": "*i32", "parts": "*fp32",
    **dict.fromkeys(("slot_stride0", "slot_stride1", "slot_stride2"), "i64"),
}  # fmt: skip
COMMON = {"SLICES": 3, "MAX_LORAS": 64, "NUM_IDS": 65, "LANES": 128, "MAX_RANK": 16, "BLOCK_RANK": 16}
SHRINK = {**COMMON, "K": 4096}
EXPAND = {
    **COMMON, "WIDTH0": 4096, "WIDTH1": 1024, "WIDTH2": 1024, "START0": 0, "START1": 4096, "START2": 5120,
    "ADD_INPUTS": True, "ALIGNED": True,
}  # fmt: skip


def vllm_dense_cases() -> Iterator[tuple[str, object, dict[str, object], int, dict[str, str]]]:
    """(name, kernel, constants, warps, types)."""
    for told, by in ((0, "members"), (256, "members that are told")):
        members = {"ROWS": 16, "ROWS_A_SLOT": 2, "SPLIT": 4, "TOLD": told}
        shrink = {**SHRINK, **members, "BLOCK_K": 256, "ALONE_K": 1024, "EARLY": not told}
        yield f"vllm shrink by {by}", shrink_members_kernel, shrink, 4, TYPES
        expand = {**EXPAND, **members, "COLUMNS": 1024, "BLOCK_N": 128, "ALONE_N": 512}
        expand |= {"SKIP_ZEROS": not told, "PARTS": 2 if told else 0, "ALL": 6144}
        yield f"vllm expand by {by}", expand_members_kernel, expand, 2, TYPES
    product = {"WIDTH": 6144, "SHARE": 4096, "BLOCK_K": 128}
    wide = {**product, "ROWS": 64, "BLOCK_N": 128, "STAGES": 4, "SWAPPED": False}
    yield "vllm product", product_kernel, wide, 4, {"weight_stride": "i32"}
    narrow = {**product, "ROWS": 16, "BLOCK_N": 64, "STAGES": 4, "SWAPPED": True}
    yield "vllm product, swapped", product_kernel, narrow, 4, {"weight_stride": "i32", "out": "*fp32"}
    tiles = {"FUSED": 4, "ROWS": 64, "BLOCK_K": 128, "SPLIT": 4}
    yield "vllm shrink by tiles", shrink_tiles_kernel, {**SHRINK, **tiles}, 4, TYPES
    tiles = {**EXPAND, "ROWS": 32, "COLUMNS": 256, "BLOCK_N": 128, "SPLIT": 4, "FILL": True}
    yield "vllm expand by tiles", expand_tiles_kernel, tiles, 4, TYPES
    sums = {"WIDTH": 4096, "MAX_LORAS": 64, "COLUMNS": 1024}
    yield "vllm sum", add_delta_kernel, sums, 4, {"token_lora_mapping": "*i32"}


def vllm_dense_fp8_cases(arch: int) -> Iterator[tuple[str, object, dict[str, object], int, dict[str, str]]]:
    """The same with FP8 weights of rank 64, whose scales change along the inputs. e4m3 came with sm_89."""
    fp8 = "fp8e4nv" if arch >= 89 else "fp8e5"
    scales = [f"{name}_scales{s}" for name in ("a", "b") for s in range(3)]
    types = {
        **TYPES, **dict.fromkeys((*scales, "x_scales", "h_scales"), "*fp32"), "x_scale_k": "i32",
        "h_scale_k": "i32", **{f"{name}{s}": f"*{fp8}" for name in ("a", "b") for s in range(3)},
    }  # fmt: skip
    common = {name: COMMON[name] for name in ("SLICES", "MAX_LORAS", "NUM_IDS", "LANES")}
    common |= {"RANK": 64, "BLOCK_RANK": 64, "GROUP_N": 128, "ALIGNED": True}
    teams, tiles = {"ROWS": 16, "TEAMS": True}, {"ROWS": 64, "TEAMS": False}
    shrink = {**common, "K": 4096, "GROUP_K": 128, "BLOCK_K": 128, "SPLIT": 4}
    for name, form, x in (("teams", teams, fp8), ("tiles", tiles, fp8), ("tiles", tiles, "bf16")):
        shape = {**shrink, **form, "X_SCALED": x == fp8}
        yield f"vllm shrink {x} x {fp8} by {name}", shrink_fp8_kernel, shape, 4, {**types, "x": f"*{x}"}
    starts = {name: value for name, value in EXPAND.items() if name[:5] in ("WIDTH", "START")}
    expand = {**common, **starts, "BLOCK_N": 128, "ADD_INPUTS": True}
    # Tiles of a high rank must not all be there at once.
    shape = {**expand, **teams, "COLUMNS": 512, "RANK": 256, "GROUP_K": 256, "H_SCALED": False}
    yield f"vllm expand fp32 x {fp8} by teams", expand_fp8_kernel, shape, 4, {**types, "h": "*fp32"}
    shape = {**expand, **tiles, "ROWS": 32, "COLUMNS": 128, "GROUP_K": 32, "BLOCK_RANK": 32, "H_SCALED": True}
    yield f"vllm expand {fp8} x {fp8} by tiles", expand_fp8_kernel, shape, 4, {**types, "h": f"*{fp8}"}
