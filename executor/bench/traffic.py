"""Counts what the ranks of Llama-3.1-8B exchange in a step, and what a slot takes on each.

It runs on the CPU: the layers have a group that adds up what it is asked to move.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from executor.distributed import ParallelGroup
from executor.layers.attention import KVCache
from executor.lora.config import LoRAConfig
from executor.lora.replace import attach_lora
from executor.models import load_model
from executor.step.forward_pass import EagerForwardPass
from executor.step.inputs import SequenceRows
from kernels.punica import PunicaWrapperCPU

SHAPES = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
LAYERS, ROWS, RANK, BLOCK = 32, 64, 16, 16


@dataclass(frozen=True, slots=True)
class CountingGroup(ParallelGroup):
    """The first rank, of whom the others are copies. `calls` and `sent` (bytes that it sends at least, in a
    ring), by collective."""

    calls: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)

    def all_reduce(self, x: Tensor) -> Tensor:
        self._count("all_reduce", 2 * (self.size - 1) * x.nbytes // self.size)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        self._count("all_gather", (self.size - 1) * x.nbytes)
        return x[None].expand(self.size, *x.shape)

    def _count(self, kind: str, nbytes: int) -> None:
        self.calls[kind] += 1
        self.sent[kind] += nbytes


@dataclass(frozen=True, slots=True)
class Row:
    """The traffic of one rank and one step of `rows` sequences that decode, all with an adapter or none; a
    slot of rank 16 is what a page-in moves to each rank."""

    part: str
    ranks: int
    sharded: bool
    adapters: bool
    rows: int
    all_reduces: int
    all_reduce_kb: float
    all_gathers: int
    all_gather_kb: float
    slot_mb: float
    slot_mb_of_all_ranks: float


@dataclass(frozen=True, slots=True)
class _Counted:
    calls: Counter[str]
    sent: Counter[str]
    slot_bytes: int


def run() -> Iterator[dict[str, object]]:
    for ranks in (2, 4, 8):
        for sharded in (False, True):
            for adapters in (False, True):
                yield asdict(_row(ranks, sharded, adapters))


def _row(ranks: int, sharded: bool, adapters: bool) -> Row:
    one, two = (_count(layers, ranks, sharded, adapters) for layers in (1, 2))

    def all_layers(first: int, second: int) -> int:
        return first + (LAYERS - 1) * (second - first)

    calls, sent = (
        {kind: all_layers(a[kind], b[kind]) for kind in ("all_reduce", "all_gather")}
        for a, b in ((one.calls, two.calls), (one.sent, two.sent))
    )
    slot = all_layers(one.slot_bytes, two.slot_bytes)
    return Row(
        part="traffic",
        ranks=ranks,
        sharded=sharded,
        adapters=adapters,
        rows=ROWS,
        all_reduces=calls["all_reduce"],
        all_reduce_kb=sent["all_reduce"] / 1e3,
        all_gathers=calls["all_gather"],
        all_gather_kb=sent["all_gather"] / 1e3,
        slot_mb=slot / 1e6,
        slot_mb_of_all_ranks=ranks * slot / 1e6,
    )


def _count(layers: int, ranks: int, sharded: bool, adapters: bool) -> _Counted:
    group = CountingGroup(0, ranks)
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**SHAPES, "num_hidden_layers": layers}))
        model = load_model(Path(folder), torch.bfloat16, "cpu", group, dummy=True)
    punica = PunicaWrapperCPU(1, ROWS)
    config = LoRAConfig(1, RANK, dtype=torch.bfloat16, fully_sharded_loras=sharded)
    arena = attach_lora(model, config, punica).arena
    cache = KVCache.allocate(ROWS, BLOCK, model.config, torch.bfloat16, "cpu", group)
    slot = 0 if adapters else -1
    step = [SequenceRows([1], 0, [number], slot, [0]) for number in range(ROWS)]
    EagerForwardPass(model, cache, punica).run(step)
    return _Counted(group.calls, group.sent, arena.nbytes_per_slot)
