"""The part of compile_ahead.py of vLLM's expert operations: each as for Qwen3-30B-A3B."""

from collections.abc import Iterator

from kernels.vllm.experts.align_kernel import align_kernel, count_kernel
from kernels.vllm.experts.kernels import moe_expand_kernel, moe_once_kernel, moe_shrink_kernel

TABLES = ("expert_ids", "post_pad", "adapter_enabled")
NUMBERS = (
    "group", "num_blocks", "chunks", "lists", "h_slice", "start", "x_scale_k", "h_scale_k", "a_scale_k",
    "b_scale_k", "b_scale_slot", "b_scale_expert", "b_scale_n",
)  # fmt: skip
TYPES = {
    **dict.fromkeys(TABLES, "*i32"), **dict.fromkeys(NUMBERS, "i32"),
    **dict.fromkeys(("a_scales0", "a_scales1", "a_scales2"), "*fp32"),
}  # fmt: skip
ALIGN = {"TOPK": 8, "NUM_EXPERTS": 128, "EXPERTS": 128, "STEP": 512, "HAS_MAP": True}
LAYER = {
    "RANK": 16, "SLICES": 2, "MAX_LORAS": 8, "NUM_EXPERTS": 128, "TOPK": 8, "LISTS": 16, "BLOCK_RANK": 16,
    "SORTED": False, "SCALED": False, "K_SCALED": False, "X_SCALED": False, "GROUP_N": 128, "GROUP_K": 128,
}  # fmt: skip
SHRINK = {**LAYER, "K": 2048, "DIVIDE": 8, "SPLIT": 2}
EXPAND = {**LAYER, "WIDTH": 768, "SPLIT": 2, "ADD_INPUTS": True, "ROUTED": True, "EARLY": True}
ONCE = {
    **{name: LAYER[name] for name in list(LAYER)[:7]}, "K": 2048, "WIDTH": 768, "DIVIDE": 8, "BLOCK_K": 128,
    "BLOCK_N": 128, "CHUNKS": 1, "COLUMN_STAGES": 2, "ADD_INPUTS": True, "ROUTED": True, "PERSISTENT": False,
}  # fmt: skip
ROWS = {"unsorted": {"BLOCK": 1, "ROWS": 1}, "sorted": {"BLOCK": 64, "ROWS": 16}}


def vllm_moe_cases() -> Iterator[tuple[str, object, dict[str, object], int, dict[str, str]]]:
    """(name, kernel, constants, warps, types)."""
    yield "vllm count", count_kernel, ALIGN, 8, TYPES
    for counted in (False, True):
        shape = {"GROUPS": 32, "COUNTED": counted, "CHUNK": 64, "BLOCK": 16, "BLOCK_PLACES": 16, "BLOCKS": 32}
        yield "vllm align", align_kernel, {**ALIGN, **shape}, 8, TYPES
    for name, rows in ROWS.items():
        single = name == "unsorted"
        inputs, columns = (1024, 512) if single else (128, 256)
        yield f"vllm expert shrink {name}", moe_shrink_kernel, {**SHRINK, **rows, "BLOCK_K": inputs}, 4, TYPES
        yield (
            f"vllm expert expand {name}",
            moe_expand_kernel,
            {**EXPAND, **rows, "BLOCK_N": columns},
            4,
            TYPES,
        )
        yield f"vllm experts at once {name}", moe_once_kernel, {**ONCE, **rows}, 4, TYPES
    persistent = {**ONCE, **ROWS["unsorted"], "CHUNKS": 2, "PERSISTENT": True}
    yield "vllm experts persistent", moe_once_kernel, persistent, 4, TYPES


def vllm_moe_fp8_cases(arch: int) -> Iterator[tuple[str, object, dict[str, object], int, dict[str, str]]]:
    """The same with FP8 weights and rows, whose scales change along the inputs. e4m3 came with sm_89."""
    fp8 = "fp8e4nv" if arch >= 89 else "fp8e5"
    stacks = {f"{name}{s}": f"*{fp8}" for name in ("a", "b") for s in range(3)}
    scaled = {"SCALED": True, "K_SCALED": True, "GROUP_N": 128, "GROUP_K": 128}
    for name, rows in ROWS.items():
        for x in (fp8, "bf16"):
            types = {**TYPES, **stacks, "x": f"*{x}"}
            shape = {**rows, **scaled, "X_SCALED": x == fp8, "BLOCK_K": 128}
            yield f"vllm expert shrink {name} {x} x {fp8}", moe_shrink_kernel, {**SHRINK, **shape}, 4, types
        shape = {**rows, **scaled, "K_SCALED": False, "BLOCK_N": 256, "X_SCALED": True}
        yield f"vllm expert expand {name} {fp8}", moe_expand_kernel, {**EXPAND, **shape}, 4, types
