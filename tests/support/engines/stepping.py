"""Drive a model over a paged cache, several sequences at a time, in chosen chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from executor.layers.attention import KVCache
from executor.models import CausalLM
from executor.step.inputs import SequenceRows, build_step


@dataclass(frozen=True, slots=True)
class Track:
    """A sequence and how it is cut: step i computes its next chunks[i] tokens (0: it sits the step out)."""

    token_ids: Sequence[int]
    block_ids: Sequence[int]
    chunks: Sequence[int]


def make_cache(model: CausalLM, num_blocks: int, block_size: int) -> KVCache:
    """A cache in the model's dtype, full of NaN: a read of what was never written shows in the result."""
    cache = KVCache.allocate(num_blocks, block_size, model.config, model.lm_head.weight.dtype, "cpu")
    for layer in cache.layers:
        layer.data.fill_(float("nan"))
    return cache


def run_tracks(model: CausalLM, cache: KVCache, tracks: Sequence[Track]) -> list[torch.Tensor]:
    """The logits of every token of each track, [len(token_ids), vocab]."""
    logits: list[list[torch.Tensor]] = [[] for _ in tracks]
    for step in range(max(len(track.chunks) for track in tracks)):
        active = [i for i, track in enumerate(tracks) if sum(track.chunks[step : step + 1])]
        token_ids, ctx = build_step([_rows(tracks[i], step, cache.block_size) for i in active], cache, None)
        rows = model.compute_logits(model(token_ids, ctx), ctx)
        for i, part in zip(active, rows.split([tracks[i].chunks[step] for i in active]), strict=True):
            logits[i].append(part)
    return [torch.cat(parts) for parts in logits]


def _rows(track: Track, step: int, block_size: int) -> SequenceRows:
    start, count = sum(track.chunks[:step]), track.chunks[step]
    blocks = track.block_ids[: -(-(start + count) // block_size)]
    return SequenceRows(track.token_ids[start : start + count], start, blocks, -1, range(count))
