"""What each rank of a group checks of captured steps; test_ranks_gpu.py runs it, on the GPU of its number."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from executor.build_shard import build_shard
from executor.config import ExecutorConfig
from executor.distributed import ParallelGroup
from executor.gpu.graphed_pass import GraphedForwardPass
from executor.lora.image import build_slot_image
from executor.ranks.shared_tokens import SharedTokensPass
from executor.step.forward_pass import EagerForwardPass
from executor.step.inputs import SequenceRows
from executor.step.shard import Shard
from tests.unit.executor.lora.adapters import make_adapter, poison

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # which FlashInfer, slow to build, does not serve, and captured attention does
    "vocab_size": 131,  # padded on the last rank
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
SEATS, SLOTS, MAX_RANK, BLOCK = 4, 2, 8, 16
# Of the whole step, relative: float32 as sums in another order differ; bfloat16 as attention kernels do.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03}
ADAPTERS = ([0, 1, -1, 0], [-1, -1, -1, -1], [1, 1, 1, 1], [-1, 0, -1, -1])  # slots by sequence


class Steps:
    """One shard, of which each step runs captured and layer by layer, over the same KV cache."""

    def __init__(self, shard: Shard, group: ParallelGroup, tolerance: float) -> None:
        self._shard, self._group, self._tolerance = shard, group, tolerance
        self._captured = SharedTokensPass(shard.forward_pass, group)
        self._plain = EagerForwardPass(shard.model, shard.kv_cache, shard.punica)
        self._lengths = [0] * SEATS

    def load(self, slot: int, rank: int, seed: int) -> None:
        arena = self._shard.arena
        poison(arena, slot)
        ranks = dict.fromkeys((part.module for part in arena.layout.slices), rank)
        arena.load(slot, build_slot_image(make_adapter(arena.layout, ranks, seed, scale=1.0), arena.layout))
        self._shard.punica.set_slot_rank(slot, rank)

    def rows(self, sequence: int, count: int, slot: int) -> SequenceRows:
        start = self._lengths[sequence]
        self._lengths[sequence] += count
        tokens = [(11 * start + 7 * row + sequence) % MODEL["vocab_size"] for row in range(count)]  # type: ignore[operator]
        blocks = [4 * sequence + number for number in range(4)]
        return SequenceRows(tokens, start, blocks, slot, (count - 1,))

    def check(self, step: Sequence[SequenceRows]) -> None:
        self._compare(step, None, step)

    def check_pending(self, step: Sequence[SequenceRows]) -> None:
        """Every last token is on rank 0's device alone."""
        tokens = torch.arange(SEATS, device=self._shard.kv_cache.device) + 5
        pending = [replace(rows, token_ids=[0], pending=SEATS - 1 - n) for n, rows in enumerate(step)]
        known = [replace(rows, token_ids=[5 + rows.pending], pending=-1) for rows in pending]
        self._compare(pending, tokens + 50 * self._group.rank, known)

    def _compare(
        self, step: Sequence[SequenceRows], last_tokens: Tensor | None, known: Sequence[SequenceRows]
    ) -> None:
        base = self._plain.run([replace(rows, slot=-1) for rows in known]).clone()
        expected = self._plain.run(known).clone()
        actual = self._captured.run(step, last_tokens)
        assert float((actual - expected).norm() / expected.norm()) < self._tolerance
        with_adapter = torch.tensor([rows.slot >= 0 for rows in known], device=base.device)
        changes = (expected - base).norm(dim=1) > 10 * self._tolerance * base.norm(dim=1)
        assert torch.equal(changes, with_adapter), "an adapter is not loud"


def captured_as_uncaptured(
    group: ParallelGroup, folder: Path, dtype: str, fully_sharded: bool, device: str = "cuda"
) -> None:
    """Prompts and decoding in every captured size and family, with adapters paged in anew after the capture,
    of other ranks than there; then with tokens that only rank 0 has."""
    (folder / f"{group.rank}").mkdir()
    (folder / f"{group.rank}" / "config.json").write_text(json.dumps(MODEL))
    shard = build_shard(
        ExecutorConfig(
            model=str(folder / f"{group.rank}"), store="unused", load_format="dummy", device=device,
            dtype=dtype, tensor_parallel_size=group.size, fully_sharded_loras=fully_sharded, max_loras=SLOTS,
            max_lora_rank=MAX_RANK, max_seats=SEATS, max_batched_tokens=32, num_kv_blocks=16,
            block_size=BLOCK, compile_processes=1,
        ),
        group,
    )  # fmt: skip
    try:
        with patch.object(GraphedForwardPass, "_eager", side_effect=AssertionError("not captured")):
            _every_kind_of_step(Steps(shard, group, TOLERANCE[dtype]))
    finally:
        shard.forward_pass.close()  # or the ranks do not part


def _every_kind_of_step(steps: Steps) -> None:
    for round_, slots in enumerate(ADAPTERS):
        for slot in range(SLOTS):
            steps.load(slot, (MAX_RANK, 3, 1, 5)[(round_ + slot) % 4], seed=10 * round_ + slot)
        steps.check([steps.rows(n, 5, slot) for n, slot in enumerate(slots)])
        for count in (4, 3, 2, 1):
            steps.check([steps.rows(n, 1, slot) for n, slot in enumerate(slots[:count])])
        steps.check_pending([steps.rows(n, 1, slot) for n, slot in enumerate(slots)])
