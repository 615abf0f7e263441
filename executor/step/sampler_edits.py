"""What requests change about their logits before a draw: masks, biases, forbidden tokens, penalties."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor.batch.sampling import SampleRequest
from executor.step.sampler_ops import chunks, on_device

Ints = npt.NDArray[np.int64]


def edited(
    logits: Tensor,
    requests: Sequence[SampleRequest],
    last_tokens: Tensor,
    mask: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """What `mask` does, biases, forbidden tokens and penalties, in this order, on a copy of `logits`
    [n, vocab]; without any of them `logits` itself."""
    biased = [row for row, request in enumerate(requests) if request.params.logit_bias]
    barred = [row for row, request in enumerate(requests) if request.forbidden_token_ids]
    penalized = [row for row, request in enumerate(requests) if request.params.penalizes]
    if not (mask or biased or barred or penalized):
        return logits
    logits = logits.clone()
    if mask:
        mask(logits)
    if biased:
        _add_biases(logits, biased, requests)
    if barred:
        _forbid(logits, barred, requests)
    for part in chunks(len(penalized), logits.shape[1]):
        rows = penalized[part]
        _penalize(logits, rows, [requests[row] for row in rows], last_tokens)
    return logits


def _add_biases(logits: Tensor, rows: Sequence[int], requests: Sequence[SampleRequest]) -> None:
    device, vocab = logits.device, logits.shape[1]
    entries = [(row, token, bias) for row in rows for token, bias in requests[row].params.logit_bias]
    if any(token >= vocab for _, token, _ in entries):
        raise ValueError(f"logit_bias names a token outside the vocabulary of {vocab}")
    places, biases = zip(*((row * vocab + token, bias) for row, token, bias in entries), strict=True)
    logits.view(-1).index_add_(
        0, on_device(places, torch.int64, device), on_device(biases, torch.float32, device)
    )


def _forbid(logits: Tensor, rows: Sequence[int], requests: Sequence[SampleRequest]) -> None:
    vocab = logits.shape[1]
    pairs = [(row, token) for row in rows for token in requests[row].forbidden_token_ids if token < vocab]
    places = [row * vocab + token for row, token in pairs]
    logits.view(-1).index_fill_(0, on_device(places, torch.int64, logits.device), -math.inf)


def _penalize(
    logits: Tensor, rows: Sequence[int], requests: Sequence[SampleRequest], last_tokens: Tensor
) -> None:
    where = on_device(rows, torch.int64, logits.device)
    part = logits[where]
    history = _History.of(requests, logits.shape[1], last_tokens)

    def column(name: str) -> Tensor:
        values = [getattr(request.params, name) for request in requests]
        return on_device(values, torch.float32, logits.device)[:, None]

    repetition = column("repetition_penalty")
    changed = torch.where(part > 0, part / repetition, part * repetition)
    part = torch.where(history.seen, changed, part)
    drop = column("presence_penalty") + column("frequency_penalty") * history.counts
    part = torch.where(history.counts > 0, part - drop, part)
    logits.index_copy_(0, where, part)


@dataclass(frozen=True, slots=True)
class _History:
    """Of each request: which tokens its prompt and its answer have, and how often its answer has them."""

    seen: Tensor  # bool [n, vocab]
    counts: Tensor  # float32 [n, vocab]

    @classmethod
    def of(cls, requests: Sequence[SampleRequest], vocab: int, last_tokens: Tensor) -> "_History":
        device = last_tokens.device
        shape = (len(requests), vocab)
        outputs = _places([request.output_token_ids for request in requests], vocab, device)
        pending = [(row, request.pending) for row, request in enumerate(requests) if request.pending >= 0]
        if pending:
            table = on_device(pending, torch.int64, device)
            outputs = torch.cat((outputs, table[:, 0] * vocab + last_tokens[table[:, 1]]))
        prompts = _places([request.prompt_token_ids for request in requests], vocab, device)
        counts = torch.zeros(shape, device=device)
        counts.view(-1).index_add_(0, outputs, torch.ones((), device=device).expand(len(outputs)))
        seen = counts > 0
        seen.view(-1).index_fill_(0, prompts, True)
        return cls(seen, counts)


def _places(tokens: Sequence[Sequence[int]], vocab: int, device: torch.device) -> Tensor:
    """Places of each row's tokens in a flat [rows, vocab]."""
    arrays: list[Ints] = [np.array(part, np.int64) + row * vocab for row, part in enumerate(tokens)]
    places = torch.from_numpy(np.concatenate(arrays))
    return (places.pin_memory() if device.type == "cuda" else places).to(device, non_blocking=True)
