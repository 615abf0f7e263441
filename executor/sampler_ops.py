"""The tensor operations behind the sampler: whole batches at once, on any device, with no wait for it."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# Elements of [rows, vocab] that are worked on at a time: it bounds the float64 and int64 temporaries.
_CHUNK_ELEMENTS = 1 << 22


def on_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host numbers, or rows of them, as a tensor. From pinned memory and without waiting: a plain copy would
    wait for all that runs."""
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)


def chunks(rows: int, vocab: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // vocab)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def eligible(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, min_p: Tensor, top_p: Tensor, widest: int
) -> Tensor:
    """bool [n, vocab]: the tokens that top_k, then min_p, then top_p leave; of equals the lowest ids.

    The three are [n, 1]: int64 in [1, widest], float64 and float64, with `widest`, 0 and infinity for off.
    """
    keys = order_keys(logits)
    ordered = keys.topk(widest).values if widest < keys.shape[1] else keys.sort(descending=True).values
    shifted = (logits.double() - logits.amax(-1, keepdim=True)) / temperatures
    scaled = shifted.gather(1, key_tokens(ordered, keys.shape[1]))
    # Each filter keeps a prefix of the order, so their number says it all.
    kept = torch.arange(widest, device=logits.device) < top_k
    kept &= (scaled >= min_p.log()) & (scaled > -math.inf)
    probabilities = torch.softmax(scaled.masked_fill(~kept, -math.inf), dim=-1)
    kept &= probabilities.cumsum(-1) - probabilities < top_p
    last = kept.sum(-1, keepdim=True).sub_(1).clamp_(min=0)
    return keys >= ordered.gather(1, last)


def order_keys(values: Tensor) -> Tensor:
    """int64, different for every token of a row: they order as `values` [n, vocab] float32 do, of equals the
    lowest token id first."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0: no negative zeros
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    tokens = torch.arange(values.shape[1], device=values.device)
    return (ordered.long() << 32) + (values.shape[1] - 1 - tokens)


def key_tokens(keys: Tensor, vocab: int) -> Tensor:
    return vocab - 1 - (keys & 0xFFFFFFFF)


def logprobs_of(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob [n], top tokens [n, count], their logprobs [n, count]) of logits [n, vocab] float32, best
    first. int64 and float64; logprob is NaN where the row is not finite."""
    totals = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = (logits.gather(1, tokens[:, None]).double() - totals).masked_fill_(~totals.isfinite(), math.nan)
    if count == 0:
        none = tokens.new_empty(len(tokens), 0)
        return chosen[:, 0], none, none.double()
    top = key_tokens(order_keys(logits).topk(count).values, logits.shape[1])
    return chosen[:, 0], top, logits.gather(1, top).double() - totals
