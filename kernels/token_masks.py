"""Bars tokens from draws by bit masks, on the GPU. The truth is kernels/reference/token_masks.py."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.token_masks import check_mask_tokens

_BLOCK = 4096


@triton.jit(do_not_specialize=["vocab", "stride"])
def mask_kernel(
    logits, rows, words, vocab, stride, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (part, mask): no logit is read, and only those of barred tokens are written."""
    mask = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = token < vocab
    word = tl.load(words + mask * stride + token // 32, mask=there, other=-1)
    barred = ((word >> (token % 32)) & 1) == 0
    row = tl.load(rows + mask).to(tl.int64)
    tl.store(logits + row * vocab + token, float("-inf"), mask=there & barred)


def mask_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Semantics: logits[rows[i], v] = -inf where bit v % 32 of words[i, v // 32] is 0.

    The arguments are those of kernels/reference/token_masks.py. Raises KernelArgumentError.
    """
    check_mask_tokens(logits, rows, words)
    vocab = logits.shape[1]
    if len(rows):
        mask_kernel[(triton.cdiv(vocab, _BLOCK), len(rows))](
            logits=logits, rows=rows, words=words, vocab=vocab, stride=words.stride(0), BLOCK=_BLOCK,
            num_warps=4,
        )  # fmt: skip
