"""How long steps of decoding take whose adapters have DoRA's factors or full heads of their own.

A full head is an embed_tokens or lm_head. Llama-3.1-8B's shapes, random weights, captured and layer by layer.
"""

import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from executor.bench.traffic import SHAPES
from executor.build_shard import build_shard
from executor.config import ExecutorConfig
from executor.distributed import SINGLE
from executor.lora.arena import TensorCopy
from executor.step.inputs import SequenceRows
from executor.step.shard import Shard

ROWS, LENGTH, BLOCK, RANK = 64, 192, 16, 16
TURNS, STEPS = 3, 10


@dataclass(frozen=True, slots=True)
class Row:
    """`ms` a step of several in a row, without sampling: what the host does for one is hidden where the GPU
    takes longer. `rows` sequences of 192 tokens, each with an adapter of its own, unless there are none."""

    part: str
    captured: bool
    step: str
    rows: int
    ms: float


def run() -> Iterator[dict[str, object]]:
    for captured in (True, False):
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps({**SHAPES, "num_hidden_layers": 32}))
            shard = build_shard(_config(folder, captured), SINGLE)
        for step, slots in _steps(shard):
            for rows in (1, ROWS) if captured else (ROWS,):
                yield asdict(Row("marked_steps", captured, step, rows, _measure(shard, slots, rows)))
        shard.forward_pass.close()
        del shard
        gc.collect()
        torch.cuda.empty_cache()


def _config(model: str, captured: bool) -> ExecutorConfig:
    return ExecutorConfig(
        model=model,
        store="unused",
        device="cuda",
        load_format="dummy",
        cuda_graphs=captured,
        compile_processes=0 if captured else 1,  # by then it is compiled
        max_loras=ROWS,
        max_lora_rank=RANK,
        max_seats=ROWS,
        max_full_heads=1,
        num_kv_blocks=ROWS * LENGTH // BLOCK,
        block_size=BLOCK,
        max_model_len=4 * LENGTH,
    )


def _steps(shard: Shard) -> Iterator[tuple[str, Callable[[int], int]]]:
    """(what is in the step, the slot of each row); what a slot has changes before each."""
    dora, heads = shard.slots.dora, shard.slots.full_heads
    if dora is None or heads is None:
        raise ValueError("several ranks have neither factors nor full heads")
    arena = shard.arena
    arena.storage.normal_(std=0.02)
    arena.ranks.fill_(RANK)
    arena.scales.fill_(1.0)
    factors = torch.rand(dora.nbytes // 4) + 0.5
    matrix = torch.zeros(heads.shape, dtype=heads.dtype)
    yield "no adapter", lambda row: -1
    yield "plain adapters", lambda row: row
    _make(dora.enter(0, factors))
    yield "one DoRA adapter", lambda row: row
    yield "plain adapters beside it", lambda row: max(row, 1)
    for slot in range(1, ROWS):
        _make(dora.enter(slot, factors))
    yield "DoRA adapters", lambda row: row
    for slot in range(ROWS):
        _make(dora.clear(slot))
    for name in ("embed_tokens", "lm_head"):
        _make(heads.enter(0, {name: matrix}))
        yield f"one {name} of its own", lambda row: row


def _make(copies: list[TensorCopy]) -> None:
    for target, source in copies:
        target.copy_(source)


@torch.inference_mode()
def _measure(shard: Shard, slot_of: Callable[[int], int], rows: int) -> float:
    blocks = LENGTH // BLOCK
    step = [
        SequenceRows([5], LENGTH - 1, list(range(row * blocks, (row + 1) * blocks)), slot_of(row), (0,))
        for row in range(rows)
    ]
    times = []
    for _ in range(TURNS + 1):
        started = time.perf_counter()
        for _ in range(STEPS):
            shard.forward_pass.run(step)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / STEPS * 1e3)
    return median(times[1:])
