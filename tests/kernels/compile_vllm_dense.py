"""The part of compile_ahead.py of vLLM's dense operations: each as for Llama-3.1-8B."""

from collections.abc import Iterator

from kernels.vllm.dense.expand_kernel import expand_members_kernel, expand_tiles_kernel
from kernels.vllm.dense.shrink_kernel import shrink_members_kernel, shrink_tiles_kernel

TYPES = {
    "counts": "*i32", "starts": "*i32", "lora_ids": "*i32", "scale": "fp32",
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
    members = {"ROWS": 16, "ROWS_A_SLOT": 2, "SPLIT": 4}
    shrink = {**SHRINK, **members, "BLOCK_K": 256, "ALONE_K": 1024}
    yield "vllm shrink by members", shrink_members_kernel, shrink, 4, TYPES
    tiles = {"FUSED": 4, "ROWS": 64, "BLOCK_K": 128, "SPLIT": 4}
    yield "vllm shrink by tiles", shrink_tiles_kernel, {**SHRINK, **tiles}, 4, TYPES
    expand = {**EXPAND, **members, "COLUMNS": 1024, "BLOCK_N": 128, "ALONE_N": 512}
    yield "vllm expand by members", expand_members_kernel, expand, 2, TYPES
    tiles = {**EXPAND, "ROWS": 32, "BLOCK_N": 128, "SPLIT": 4}
    yield "vllm expand by tiles", expand_tiles_kernel, tiles, 4, TYPES
