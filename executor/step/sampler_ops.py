"""The tensor operations behind the sampler: whole batches at once, on any device, with no wait for it."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.reference.nucleus import key_tokens, order_keys

# Elements of [rows, vocab] that are worked on at a time: it bounds the float64 and int64 temporaries.
_CHUNK_ELEMENTS = 1 << 22


def on_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host numbers, or rows of them, as a tensor. From pinned memory and without waiting: a plain copy would
    wait for all that runs."""
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)


def chunks(rows: int, vocab: int, most_elements: int = _CHUNK_ELEMENTS) -> Iterator[slice]:
    step = max(1, most_elements // vocab)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


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
