"""Decode attention with each block size, in CUDA graphs over rotating caches, against its bytes."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from kernels.bench.inputs import COPY_RATE, ROTATED_BYTES
from kernels.bench.timing import Call, in_processes, time_calls
from kernels.paged_decode import DecodeConfig, decode_config, paged_decode

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
POINTS = ((1, 192), (1, 1024), (8, 192), (16, 192), (32, 192), (64, 192), (64, 1024), (128, 256), (256, 320))
CONFIGS = [
    DecodeConfig(block_kv, 1, warps, stages)
    for block_kv, warps, stages in product((32, 64, 128), (2, 4), (1, 2, 3))
    if (warps == 4 or block_kv == 32) and block_kv * stages < 384
]


@dataclass(frozen=True, slots=True)
class Row:
    """`chosen`: what paged_decode takes by itself."""

    op: str
    sequences: int
    context: int
    config: str
    chosen: bool
    us: float
    floor_us: float


def run() -> Iterator[dict[str, object]]:
    splits = sorted({decode_config(sequences, KV_HEADS).splits for sequences, _ in POINTS})
    in_processes(_compile, [(count, config) for count in splits for config in CONFIGS])
    for sequences, context in POINTS:
        chosen = decode_config(sequences, KV_HEADS)
        configs = {chosen} | {replace(config, splits=chosen.splits) for config in CONFIGS}
        nbytes = 2 * sequences * context * KV_HEADS * HEAD_DIM * 2
        rate = next((rate for name, rate in COPY_RATE.items() if name in torch.cuda.get_device_name()), 3e12)
        ordered = sorted(configs, key=str)
        calls = [(_call(sequences, context, config), 24) for config in ordered]
        for config, us in zip(ordered, time_calls(calls), strict=True):
            row = Row(
                "paged_decode", sequences, context, str(config), config == chosen, us, nbytes / rate * 1e6
            )
            yield asdict(row)


def _compile(splits: int, config: DecodeConfig) -> None:
    _call(1, 64, replace(config, splits=splits))(0)
    torch.cuda.synchronize()


def _call(sequences: int, context: int, config: DecodeConfig) -> Call:
    pages = -(-context // PAGE)
    blocks = sequences * pages
    copies = max(2, min(12, int(ROTATED_BYTES / (blocks * PAGE * KV_HEADS * HEAD_DIM * 4)) + 1))
    shape = (2, blocks, PAGE, KV_HEADS, HEAD_DIM)
    caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    query = torch.randn(sequences, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    indices = torch.randperm(blocks, device="cuda").int()
    indptr = torch.arange(0, blocks + 1, pages, device="cuda").int()
    last = torch.full((sequences,), (context - 1) % PAGE + 1, device="cuda").int()
    return partial(_run, torch.empty_like(query), query, caches, (indices, indptr, last), config)


def _run(
    out: Tensor,
    query: Tensor,
    caches: list[Tensor],
    tables: tuple[Tensor, Tensor, Tensor],
    config: DecodeConfig,
    index: int,
) -> None:
    paged_decode(out, query, caches[index % len(caches)], *tables, None, config)
