"""Bars tokens from being drawn: bit masks of the vocabulary over rows of logits."""

import math

import torch
from torch import Tensor

from kernels.launching.checks import check, check_same_device

_BITS = 32


def mask_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Semantics: logits[rows[i], v] = -inf where bit v % 32 of words[i, v // 32] is 0.

    logits  float32 [n, vocab], contiguous
    rows    int32 [m], each below n and none twice
    words   int32 [m, ceil(vocab / 32)], each row contiguous

    Raises KernelArgumentError.
    """
    check_mask_tokens(logits, rows, words)
    tokens = torch.arange(logits.shape[1], device=logits.device)
    barred = (words[:, tokens // _BITS] >> (tokens % _BITS)) & 1 == 0
    where = rows.long()
    logits[where] = logits[where].masked_fill(barred, -math.inf)


def check_mask_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    check(
        logits.ndim == 2 and logits.dtype == torch.float32 and logits.is_contiguous(),
        "logits",
        "must be a contiguous float32 [rows, vocab]",
    )
    check(rows.ndim == 1 and rows.dtype == torch.int32, "rows", "must be an int32 [masks]")
    shape = (len(rows), -(-logits.shape[1] // _BITS))
    fits = words.shape == shape and words.dtype == torch.int32 and words.stride(1) == 1
    check(fits, "words", f"must be an int32 {list(shape)} of contiguous rows")
    check_same_device(logits.device, rows=rows, words=words)
