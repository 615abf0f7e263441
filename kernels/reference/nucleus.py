"""Which tokens top_k, min_p and top_p leave: a prefix of the order by logit, of equals the lowest id first."""

import math

import torch
from torch import Tensor

from kernels.checks import check, check_same_device

# Weight of a row's largest logit; the others have exp of their distance from it, rounded to a whole number.
# Sums of integers depend on no order, so every device finds the same prefix. 2^40 leaves room for 2^23 tokens.
WEIGHT_BITS = 40
# scaled logits below this weigh nothing
LEAST_SCALED = -(WEIGHT_BITS + 1) * math.log(2.0)


def nucleus(
    logits: Tensor, best: Tensor, temperatures: Tensor, top_k: Tensor, min_p: Tensor, top_p: Tensor
) -> Tensor:
    """Semantics: bool [rows, vocab], what top_k, then min_p, then top_p leave. With a row's tokens in order,
    scaled = (logits - best) / temperature in float64 and weight = round(2^40 * exp(scaled)):

        kept = (place < top_k) & (scaled >= log(min_p)) & (scaled > -inf)
        kept &= (weight of the kept before it < top_p * weight of all kept), where top_p < 1

    logits        float32 [rows, vocab], contiguous
    best          float32 [rows], the largest of each row; where it is not finite, any tokens come out
    temperatures  float64 [rows], above 0
    top_k         int64 [rows], at least 1; vocab or more: off
    min_p         float64 [rows], 0: off
    top_p         float64 [rows], above 0; 1 or more: off

    Raises KernelArgumentError.
    """
    check_nucleus(logits, best, temperatures, top_k, min_p, top_p)
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    scaled = (values.double() - best[:, None]) / temperatures[:, None]
    kept = torch.arange(logits.shape[1], device=logits.device) < top_k[:, None]
    kept &= (scaled >= min_p.log()[:, None]) & (scaled > -math.inf)
    weights = torch.where(kept, (scaled.exp() * 2.0**WEIGHT_BITS + 0.5).long(), 0)
    before = weights.cumsum(-1) - weights
    enough = (weights.sum(-1).double() * top_p).ceil()
    kept &= (top_p >= 1)[:, None] | (before < enough.nan_to_num_().long()[:, None])
    return torch.zeros_like(kept).scatter_(1, order, kept)


def check_nucleus(
    logits: Tensor, best: Tensor, temperatures: Tensor, top_k: Tensor, min_p: Tensor, top_p: Tensor
) -> None:
    matrix = logits.dim() == 2 and logits.is_contiguous() and logits.dtype == torch.float32
    check(matrix, "logits", "must be a contiguous float32 [rows, vocab]")
    for argument, values, dtype in (
        ("best", best, torch.float32),
        ("temperatures", temperatures, torch.float64),
        ("top_k", top_k, torch.int64),
        ("min_p", min_p, torch.float64),
        ("top_p", top_p, torch.float64),
    ):
        fits = values.shape == logits.shape[:1] and values.dtype == dtype and values.is_contiguous()
        check(fits, argument, f"must be a contiguous {dtype} [{len(logits)}]")
    check_same_device(
        logits.device, best=best, temperatures=temperatures, top_k=top_k, min_p=min_p, top_p=top_p
    )
