"""Philox4x32-10, a counter-based random number generator, on int64 tensors.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. A word is a function of (key, counter)
and of nothing else, so a token's noise depends neither on what ran before nor on who shares the batch, and
every device computes the same integers.
"""

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

# The noise lies within (-3.14, 22.88): -log(-log(u)) at the ends of u.
NOISE_RANGE = 26.1

Word = Tensor | int  # values in [0, 2^32); a tensor is int64


def philox4x32(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]
) -> tuple[Word, Word, Word, Word]:
    """The four output words for a counter of four words and a key of two; tensors broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def gumbel_noise(seed: Word, position: Word, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, for drawing one of `token_ids` at `position` with a 64-bit `seed`.

    Tensors broadcast: seeds and positions [rows, 1] with token ids [vocab] give [rows, vocab]. Tensors
    are int64; one of seeds holds their bits.

    Semantics: -log(-log((w + 1/2) / 2^32)), where w is the first word for the counter (token_id, 0, position
    low, position high) and the key (seed low, seed high). Computed in float64 and rounded once, so that a
    device's own last bit of a logarithm does not show.
    """
    key = (seed & _MASK, (seed >> 32) & _MASK)
    word, *_ = philox4x32((token_ids, 0, position & _MASK, position >> 32), key)
    uniform = torch.as_tensor(word, device=token_ids.device).double().add_(0.5).div_(2.0**32)
    return uniform.log_().neg_().log_().neg_().float()


def _multiply(a: int, b: Word) -> tuple[Word, Word]:
    """(high, low) words of the product. It has 64 bits: int64 wraps to the same bits with a sign, and
    the masks drop the sign that the shift drags in."""
    product = a * b
    return (product >> 32) & _MASK, product & _MASK
