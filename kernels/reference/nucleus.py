"""Which tokens top_k, min_p and top_p leave: a prefix of the order by logit, then by id."""

import math

import torch
from torch import Tensor

from kernels.launching.checks import check_sampled_rows

# Weight of a row's largest logit; the others have exp of their distance from it, rounded to a whole number.
# Sums of integers depend on no order, so every device finds the same prefix; 2^23 tokens find room in them.
WEIGHT_BITS = 40
# The weight of what lies further down is 0.
LEAST_SCALED = -(WEIGHT_BITS + 1) * math.log(2.0)


def nucleus(
    logits: Tensor,
    best: Tensor,
    temperatures: Tensor,
    top_k: Tensor | None,
    min_p: Tensor,
    top_p: Tensor | None,
) -> Tensor:
    """Semantics: bool [rows, vocab], what top_k, then min_p, then top_p leave. With a row's tokens in order,
    scaled = (logits - best) / temperature in float64 and weight = round(2^40 * exp(scaled)):

        kept = (place < top_k) & (scaled >= log(min_p)) & (scaled > -inf)
        kept &= (weight of the kept before it < top_p * weight of all kept), where top_p < 1

    logits        float32 [rows, vocab], contiguous
    best          float32 [rows], the largest of each row; where it is not finite, any tokens come out
    temperatures  float64 [rows], above 0
    top_k         int64 [rows], at least 1; vocab or more: off. None: off in all rows
    min_p         float64 [rows], 0: off
    top_p         float64 [rows], above 0; 1 or more: off. None: as top_k's

    Raises KernelArgumentError.
    """
    check_nucleus(logits, best, temperatures, top_k, min_p, top_p)
    vocab = logits.shape[1]
    widest = vocab if top_k is None or len(logits) == 0 else min(int(top_k.max()), vocab)
    keys = order_keys(logits)
    ordered = keys.topk(widest).values if widest < vocab else keys.sort(descending=True).values
    scaled = (logits.gather(1, key_tokens(ordered, vocab)).double() - best[:, None]) / temperatures[:, None]
    # Each filter keeps a prefix of the order, so their number says it all.
    kept = (scaled >= min_p.log()[:, None]) & (scaled > -math.inf)
    if top_k is not None:
        kept &= torch.arange(widest, device=logits.device) < top_k[:, None]
    if top_p is not None:
        weights = (scaled.exp() * 2.0**WEIGHT_BITS + 0.5).masked_fill_(~kept, 0).long()
        enough = (weights.sum(-1).double() * top_p).ceil().masked_fill_(top_p >= 1, 2.0**62)
        kept &= weights.cumsum(-1) - weights < enough.long()[:, None]
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


def check_nucleus(
    logits: Tensor,
    best: Tensor,
    temperatures: Tensor,
    top_k: Tensor | None,
    min_p: Tensor,
    top_p: Tensor | None,
) -> None:
    vectors = {
        "best": (best, torch.float32),
        "temperatures": (temperatures, torch.float64),
        "top_k": (top_k, torch.int64),
        "min_p": (min_p, torch.float64),
        "top_p": (top_p, torch.float64),
    }
    given = {name: (each, dtype) for name, (each, dtype) in vectors.items() if each is not None}
    check_sampled_rows(logits, **given)
