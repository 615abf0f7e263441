"""The rows that each sequence has in a step, and the tensors and context that layers take for them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from executor.layers.attention import KVCache, Span, plan_attention
from executor.layers.context import ForwardContext
from executor.layers.followers import TORCH_FOLLOWERS, Followers
from kernels.metadata.meta import LoRAMapping
from kernels.punica import PunicaWrapperBase


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's share of a step."""

    token_ids: Sequence[int]  # the tokens to compute now
    start: int  # position of the first of them, which is how many are computed already
    block_ids: Sequence[int]  # KV blocks that cover positions [0, start + len(token_ids))
    slot: int  # LoRA slot, -1 for the base model
    logit_rows: Sequence[int]  # indices into token_ids whose logits are wanted: often just the last, or none
    # Index into the step's `last_tokens` of the last token's id, which only the device knows yet (in
    # token_ids it is 0); -1: all ids are known.
    pending: int = -1

    def __reduce__(self) -> tuple[type["SequenceRows"], tuple[object, ...]]:
        """Every step goes to every other rank. Without this pickle takes twice as long: 290 us instead of 130
        for 64 sequences of 16 blocks, there and back, on a CPU of 2 cores with Python 3.11."""
        fields = (
            self.token_ids, self.start, self.block_ids, self.slot, self.logit_rows, self.pending,
        )  # fmt: skip
        return SequenceRows, fields


def build_step(
    sequences: Sequence[SequenceRows],
    kv_cache: KVCache,
    punica: PunicaWrapperBase | None,
    followers: Followers = TORCH_FOLLOWERS,
) -> tuple[Tensor, ForwardContext]:
    """Returns (token_ids [rows] int64, context), and tells `punica` which rows belong to which slot.

    The context is valid until the next call. Raises ValueError when a sequence has no tokens, too few or
    nonexistent blocks, or asks for logits of a row that it does not have.
    """
    for sequence in sequences:
        check(sequence, kv_cache)
    device = kv_cache.device
    spans = _spans(sequences, kv_cache)
    token_ids = [token for sequence in sequences for token in sequence.token_ids]
    positions = [span.start + i for span in spans for i in range(span.query_len)]
    logits_rows = [
        span.first_row + i
        for span, sequence in zip(spans, sequences, strict=True)
        for i in sequence.logit_rows
    ]
    if punica is not None:
        punica.update_metadata(
            LoRAMapping(
                index_mapping=_runs((sequence.slot, len(sequence.token_ids)) for sequence in sequences),
                prompt_mapping=_runs((sequence.slot, len(sequence.logit_rows)) for sequence in sequences),
            )
        )
    context = ForwardContext(
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64, device=device),
        kv_cache=kv_cache,
        attention=plan_attention(spans, kv_cache),
        followers=followers,
        punica=punica,
    )
    return torch.tensor(token_ids, dtype=torch.int64, device=device), context


def check(sequence: SequenceRows, kv_cache: KVCache) -> None:
    """Raises ValueError, saying what is impossible."""
    query_len = len(sequence.token_ids)
    if query_len == 0 or sequence.start < 0:
        raise ValueError(
            f"a sequence of a step needs tokens and start >= 0, not {query_len} at {sequence.start}"
        )
    if len(sequence.block_ids) * kv_cache.block_size < sequence.start + query_len:
        raise ValueError(f"{len(sequence.block_ids)} blocks do not cover {sequence.start + query_len} tokens")
    if min(sequence.block_ids) < 0 or max(sequence.block_ids) >= kv_cache.num_blocks + kv_cache.spare_blocks:
        raise ValueError(f"block ids {sequence.block_ids} are not all below {kv_cache.num_blocks}")
    if sequence.logit_rows and not 0 <= min(sequence.logit_rows) <= max(sequence.logit_rows) < query_len:
        raise ValueError(f"logit_rows {sequence.logit_rows} are not all below {query_len}")


def _spans(sequences: Sequence[SequenceRows], kv_cache: KVCache) -> list[Span]:
    spans: list[Span] = []
    first_row = 0
    offsets = torch.arange(kv_cache.block_size, device=kv_cache.device)
    for sequence in sequences:
        query_len = len(sequence.token_ids)
        blocks = torch.tensor(sequence.block_ids, dtype=torch.int64, device=kv_cache.device)
        slots = (blocks[:, None] * kv_cache.block_size + offsets).flatten()
        spans.append(Span(first_row, sequence.start, query_len, slots[: sequence.start + query_len]))
        first_row += query_len
    return spans


def _runs(rows: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """[(0, 3), (0, 2), (-1, 0), (1, 1)] -> ((0, 5), (1, 1)): neighbours of one slot joined, no empty runs."""
    present = ((slot, count) for slot, count in rows if count)
    grouped = groupby(present, key=lambda run: run[0])
    return tuple((slot, sum(count for _, count in group)) for slot, group in grouped)
