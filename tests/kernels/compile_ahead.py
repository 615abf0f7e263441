"""Compiles every kernel for cards that are not here: `-m tests.kernels.compile_ahead ARCH`."""

import sys
from collections.abc import Iterator

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.gumbel_draw import draw_kernel
from kernels.launching.slot_block import UNIT
from kernels.lora_embedding import embedding_kernel
from kernels.lora_expand import expand_kernel
from kernels.lora_shrink import shrink_kernel
from kernels.metadata.launch_plan import PARTS
from kernels.nucleus import begin_kernel, keep_kernel, last_kept_kernel, narrow_kernel
from kernels.paged_decode import merge_kernel, paged_decode_kernel
from kernels.scale_outputs import scale_outputs_kernel
from kernels.slot_scatter import scatter_kernel
from tests.kernels.compile_followers import follower_cases
from tests.kernels.compile_moe import ARGUMENTS, COUNTS, fp8_cases, moe_cases
from tests.kernels.compile_vllm_dense import vllm_dense_cases, vllm_dense_fp8_cases
from tests.kernels.compile_vllm_moe import vllm_moe_cases, vllm_moe_fp8_cases

POINTERS = {
    "h": "*fp32", "partials": "*fp32", "scales": "*fp32", "output_scale": "*fp32", "ranks": "*i32",
    "work": "*i32", "order": "*i32", "finished": "*i32", "token_ids": "*i64", "slot_stride": "i64",
    "offset1": "i64", "offset2": "i64", "cos": "*fp32", "sin": "*fp32", "mapping": "*i32", "starts": "*i32",
    "kv_slots": "*i64", "eps": "fp32", "tokens": "*i64", "scores": "*fp64", "logits": "*fp32",
    "best": "*fp32", "temperatures": "*fp64", "seeds": "*i64", "positions": "*i64", "kv_indices": "*i32",
    "kv_indptr": "*i32", "last_page_len": "*i32", "scale_log2": "fp32", "kept": "*u8", "stripe": "*i32",
    "block": "*i32", "pieces": "*i32", "tables": "*i32", "shrink_ranks": "*i32", "slot": "i32",
    "slices": "i32", "max_loras": "i32", "cells": "*i64", "lists": "*i32", "last_orders": "*i64",
    "min_p": "*fp64", "factors": "*fp32", "marks": "*i32", **ARGUMENTS,
}  # fmt: skip
# Bytes that one program can have.
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
COMMON = {"MAX_LORAS": 64, "MAX_RANK": 64, "PARTS": PARTS}
SHRINK = {**COMMON, "K": 4096, "SLICES": 3}
EXPAND = {
    **COMMON, "WIDTH0": 4096, "WIDTH1": 1024, "WIDTH2": 1024, "START0": 0, "START1": 4096, "START2": 5120,
    "SLICES": 3, "HAS_OUTPUT_SCALE": False, "ADD_INPUTS": True, "NARROW": 64, "PART_RANKS": 128,
}  # fmt: skip


def cases() -> Iterator[tuple[str, object, dict[str, object], int]]:
    """(name, kernel, constants, warps): each body of each kernel."""
    one_row = {"FUSED": 1, "ROWS": 1, "BLOCK_RANK": 8, "BLOCK_K": 1024, "SPLIT": 4, "FINALISE": False}
    shared = {"FUSED": 1, "ROWS": 16, "BLOCK_RANK": 16, "BLOCK_K": 256, "SPLIT": 16, "FINALISE": True}
    widest = {**shared, "BLOCK_RANK": 32, "BLOCK_K": 512}
    tiles = {"FUSED": 4, "ROWS": 64, "BLOCK_RANK": 16, "BLOCK_K": 128, "SPLIT": 2, "FINALISE": True}
    for name, body in (("one row", one_row), ("shared", shared), ("widest", widest), ("tiles", tiles)):
        yield f"shrink {name}", shrink_kernel, {**SHRINK, **body}, 4
    one_row = {"ROWS": 1, "SPLIT": 4, "BLOCK_RANK": 16, "BLOCK_N": 1024}
    shared = {"ROWS": 16, "SPLIT": 1, "BLOCK_RANK": 16, "BLOCK_N": 128}
    tiles = {**shared, "ROWS": 64, "BLOCK_RANK": 64}
    overwrite = {**shared, "ADD_INPUTS": False, "HAS_OUTPUT_SCALE": True}
    for name, body in (
        ("one row", one_row),
        ("shared", shared),
        ("tiles", tiles),
        ("overwrite, scaled", overwrite),
    ):
        yield f"expand {name}", expand_kernel, {**EXPAND, **body}, 4
    gather = {"MAX_LORAS": 64, "MAX_RANK": 64, "ROWS": 16, "BLOCK_RANK": 16}
    yield "embedding", embedding_kernel, gather, 2
    draw = {"RANGE": 26.1, "BLOCK": 1024, "BLOCKS": 4}
    yield "draw", draw_kernel, {**draw, "HAS_KEPT": False}, 4
    yield "draw, filtered", draw_kernel, {**draw, "HAS_KEPT": True}, 4
    yield "slot scatter", scatter_kernel, {"UNIT": UNIT, "UNITS": 128}, 4
    decode = {
        "KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "PAGE": 16, "BLOCK_KV": 64, "SPLITS": 1, "WINDOW": 0,
        "ROWS": 16, "SINKS": False,
    }  # fmt: skip
    yield "paged decode", paged_decode_kernel, decode, 4
    yield "paged decode, tokens shared", paged_decode_kernel, {**decode, "SPLITS": 8, "WINDOW": 64}, 4
    yield "paged decode, sinks", paged_decode_kernel, {**decode, "SPLITS": 8, "SINKS": True}, 4
    yield "paged decode's merge", merge_kernel, {"HEAD_DIM": 128, "SPLITS": 8}, 2
    scaled = {"WIDTH": 28672, "MAX_LORAS": 64, "BLOCK_N": 1024}
    yield "scale outputs", scale_outputs_kernel, {**scaled, "HAS_BIAS": False}, 4
    yield "scale outputs, bias shared", scale_outputs_kernel, {**scaled, "HAS_BIAS": True}, 4
    yield from follower_cases()
    yield from moe_cases()


def nucleus_cases() -> Iterator[tuple[str, object, dict[str, object], int, dict[str, str]]]:
    """As `cases`, with types that differ by what is counted."""
    for ones, goals in ((True, "*i64"), (False, "*fp64")):
        what = "tokens" if ones else "weights"
        search = {
            "LEAST_SCALED": -28.4, "BITS": 40, "NONE": -(1 << 63), "ONES": ones, "PARTS": 64, "PIVOTS": 16,
        }  # fmt: skip
        one = {**search, "TURNS": 3, "MOST_TURNS": 24, "BLOCK": 1024}
        types = {"goals": goals}
        yield f"begin by {what}", begin_kernel, {**search, "BLOCK": 128}, 4, types
        yield f"narrow by {what}", narrow_kernel, {**search, "BLOCK": 128, "LIST_BLOCK": 1024}, 4, types
        yield f"last kept by {what}", last_kept_kernel, one, 16, types
    yield "keep", keep_kernel, {"TINY": 1e-200, "BLOCK": 1024}, 4, {}


def compile_case(
    kernel: object, constants: dict[str, object], warps: int, arch: int, element: str, types=None
):
    pdl = "PDL" in kernel.arg_names
    constants = {**constants, "PDL": arch >= 90} if pdl else constants
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        strides = name.endswith("stride") or name.startswith("b_stride")
        counts = name in (
            "num_rows",
            "vocab",
            "length",
            "turn",
            "listed",
            "slot",
            "slices",
            "max_loras",
            *COUNTS,
        )
        integer = "i32" if strides or counts else f"*{element}"
        signature[name] = {**POINTERS, **(types or {})}.get(name, integer)
        if not counts and name not in ("eps", "scale", "scale_log2"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "launch_pdl": pdl and arch >= 90}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    if compiled.metadata.shared > SHARED_MEMORY[arch]:
        raise SystemExit(f"{kernel.__name__}: {compiled.metadata.shared} bytes of shared memory, sm_{arch}")
    return compiled


if __name__ == "__main__":
    arch = int(sys.argv[1])
    for name, kernel, constants, warps in cases() if arch != 89 else ():
        # float32 takes another path through the dot; one body shows it.
        for element in ("bf16", "fp32") if name.endswith("shared") else ("bf16",):
            compiled = compile_case(kernel, constants, warps, arch, element)
            sys.stdout.write(f"{name} {element}: {len(compiled.asm['cubin'])} bytes of sm_{arch}\n")
    typed = [] if arch == 89 else [*nucleus_cases(), *vllm_dense_cases(), *vllm_moe_cases()]
    typed += [*fp8_cases(arch), *vllm_moe_fp8_cases(arch), *vllm_dense_fp8_cases(arch)]
    for name, kernel, constants, warps, types in typed:
        compiled = compile_case(kernel, constants, warps, arch, "bf16", types)
        sys.stdout.write(f"{name}: {len(compiled.asm['cubin'])} bytes of sm_{arch}\n")
