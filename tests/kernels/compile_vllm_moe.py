"""The part of compile_ahead.py of vLLM's expert operations: each as for Qwen3-30B-A3B."""

from collections.abc import Iterator

from kernels.vllm.moe_align_kernel import align_kernel, count_kernel

TABLES = ("expert_ids", "post_pad", "adapter_enabled")
NUMBERS = ("group", "num_blocks", "chunks")
TYPES = dict.fromkeys(TABLES, "*i32") | dict.fromkeys(NUMBERS, "i32")
ALIGN = {"TOPK": 8, "NUM_EXPERTS": 128, "EXPERTS": 128, "STEP": 512, "HAS_MAP": True}


def vllm_moe_cases() -> Iterator[tuple[str, object, dict[str, object], int, dict[str, str]]]:
    """(name, kernel, constants, warps, types)."""
    yield "vllm count", count_kernel, ALIGN, 8, TYPES
    for counted in (False, True):
        shape = {"GROUPS": 32, "COUNTED": counted, "CHUNK": 64, "BLOCK": 16, "BLOCK_PLACES": 16, "BLOCKS": 32}
        yield "vllm align", align_kernel, {**ALIGN, **shape}, 8, TYPES
