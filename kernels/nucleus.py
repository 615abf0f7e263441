"""top_k, min_p and top_p without sorting the vocabulary. The truth is kernels/reference/nucleus.py.

A filter keeps the tokens before which less than a target lies, in tokens or in weight. The last of them is
found by narrowing a range of values: one pass over the candidates sums what lies above three pivots, another
copies those in the quarter where the target falls. Weights are integers, so no order of summing shows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.nucleus import LEAST_SCALED, WEIGHT_BITS, check_nucleus

_BLOCK = 2048
_WARPS = 16
_KEEP_BLOCK = 2048
# Half of the turns quarter a range of 2^32 keys: more than that never come.
_MOST_TURNS = 40


@triton.jit
def _key(value):
    """int32 that orders as float32 does; -0.0 as 0.0."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _pivot(low, high, quarter, turn):
    """A key in [low, high) about `quarter` quarters from low to high. Values narrow fast where tokens are
    spread evenly; keys, in turn with them, end in at most 16 turns whatever the values are."""
    if turn % 2 == 0:
        first, last = _value(low), _value(high)
        middle = _key(first + (last - first) * (quarter * 0.25)).to(tl.int64)
    else:
        middle = low + (high - low) * quarter // 4
    return tl.minimum(tl.maximum(middle, low), high - 1)


@triton.jit
def _candidates(logits, tokens, start, count, turn, BLOCK: tl.constexpr):
    """(token, key, value, there): first all tokens of the row, then those of the list."""
    place = start + tl.arange(0, BLOCK)
    there = place < count
    token = tl.load(tokens + place, mask=there & (turn > 0), other=0)
    token = tl.where(turn > 0, token, place)
    value = tl.load(logits + token, mask=there, other=float("-inf"))
    return token, _key(value), value, there


@triton.jit
def _weight(value, best, temperature, least, ONES: tl.constexpr, BITS: tl.constexpr):
    if ONES:
        return (value > float("-inf")).to(tl.int64)
    else:
        scaled = (value.to(tl.float64) - best) / temperature
        weight = (tl.exp(scaled) * (1 << BITS) + 0.5).to(tl.int64)
        return tl.where((scaled >= least) & (value > float("-inf")), weight, 0)


@triton.jit
def _last_kept(
    logits, tokens, vocab, best, temperature, least, last_key, last_token, low, goal,
    ONES: tl.constexpr, BITS: tl.constexpr, MOST_TURNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(key, token) of the last token before which less than the target lies.

    ONES: tokens are counted, and goal is the target; else weights are summed, and goal is the target's share
    of all. Only tokens up to (last_key, last_token), and above the key `low`, have weight.
    """
    high = _key(best.to(tl.float32)).to(tl.int64)
    low = tl.minimum(low.to(tl.int64), high - 1)
    count, turn = vocab, 0
    above = tl.zeros((), tl.int64)
    target = tl.zeros((), tl.int64)
    while ((low + 1 < high) | (turn == 0)) & (turn < MOST_TURNS):
        listed = tokens + (turn % 2) * vocab
        third = _pivot(low, high, 3, turn)
        second = _pivot(low, high, 2, turn)
        first = _pivot(low, high, 1, turn)
        over0 = tl.zeros((BLOCK,), tl.int64)
        over1 = tl.zeros((BLOCK,), tl.int64)
        over2 = tl.zeros((BLOCK,), tl.int64)
        over3 = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, count, BLOCK):
            token, key, value, there = _candidates(logits, listed, start, count, turn, BLOCK)
            weight = _weight(value, best, temperature, least, ONES, BITS)
            before = (key > last_key) | ((key == last_key) & (token <= last_token))
            weight = tl.where(there & before & (key > low), weight, 0)
            over0 += weight
            over1 += tl.where(key > first, weight, 0)
            over2 += tl.where(key > second, weight, 0)
            over3 += tl.where(key > third, weight, 0)
        sum1, sum2, sum3 = tl.sum(over1), tl.sum(over2), tl.sum(over3)
        if turn == 0:
            total = tl.sum(over0)
            target = goal if ONES else tl.ceil(total.to(tl.float64) * goal).to(tl.int64)
            target = tl.maximum(tl.minimum(target, total), 1)  # reached somewhere above `low`
        if above + sum3 >= target:
            low = third
        elif above + sum2 >= target:
            low, high, above = second, third, above + sum3
        elif above + sum1 >= target:
            low, high, above = first, second, above + sum2
        else:
            high, above = first, above + sum1
        inside = tl.zeros((), tl.int32)
        least_key = high
        most_key = low + 1
        for start in range(0, count, BLOCK):
            token, key, value, there = _candidates(logits, listed, start, count, turn, BLOCK)
            before = (key > last_key) | ((key == last_key) & (token <= last_token))
            chosen = there & before & (key > low) & (key <= high)
            place = inside + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(tokens + ((turn + 1) % 2) * vocab + place, token, mask=chosen)
            inside += tl.sum(chosen.to(tl.int32))
            wide = key.to(tl.int64)
            least_key = tl.minimum(least_key, tl.min(tl.where(chosen, wide, high)))
            most_key = tl.maximum(most_key, tl.max(tl.where(chosen, wide, low + 1)))
        low, high, count = least_key - 1, most_key, inside
        turn += 1
        tl.debug_barrier()  # the list is there for all threads
    # What is left has one value; the list is in the order of the token ids.
    one = _weight(_value(high), best, temperature, least, ONES, BITS)
    more = tl.minimum(tl.cdiv(target - above, tl.maximum(one, 1)), count.to(tl.int64))
    token = tl.load(tokens + (turn % 2) * vocab + tl.maximum(more - 1, 0))
    return high.to(tl.int32), token


@triton.jit(do_not_specialize=["vocab"])
def last_kept_kernel(
    last_keys, last_tokens, lists, logits, best, temperatures, top_k, min_p, top_p, vocab,
    LEAST_SCALED: tl.constexpr, BITS: tl.constexpr, MOST_TURNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): the last token that top_k and top_p leave, by the key of its logit and its id."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    lists += row * 2 * vocab
    largest = tl.load(best + row).to(tl.float64)
    temperature, share, wanted = tl.load(temperatures + row), tl.load(top_p + row), tl.load(top_k + row)
    least = tl.maximum(tl.log(tl.load(min_p + row)), LEAST_SCALED)
    last_key, last_token = tl.full((), -2147483648, tl.int32), vocab
    finite = tl.abs(largest) < float("inf")
    if finite & (wanted < vocab):
        lowest = _key(tl.full((), float("-inf"), tl.float32))
        last_key, last_token = _last_kept(
            logits, lists, vocab, largest, temperature, least, last_key, last_token, lowest, wanted, True,
            BITS, MOST_TURNS, BLOCK,
        )  # fmt: skip
    if finite & (share < 1):
        lowest = _key((largest + (least - 1) * temperature).to(tl.float32))
        last_key, last_token = _last_kept(
            logits, lists, vocab, largest, temperature, least, last_key, last_token, lowest, share, False,
            BITS, MOST_TURNS, BLOCK,
        )  # fmt: skip
    tl.store(last_keys + row, last_key)
    tl.store(last_tokens + row, last_token)


@triton.jit(do_not_specialize=["vocab"])
def keep_kernel(
    kept, logits, best, temperatures, min_p, last_keys, last_tokens, vocab, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row, part): whether each token of the part stays."""
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = token < vocab
    first = row.to(tl.int64) * vocab
    value = tl.load(logits + first + token, mask=there, other=float("-inf"))
    scaled = (value.to(tl.float64) - tl.load(best + row).to(tl.float64)) / tl.load(temperatures + row)
    key, last_key, last_token = _key(value), tl.load(last_keys + row), tl.load(last_tokens + row)
    stays = (key > last_key) | ((key == last_key) & (token <= last_token))
    stays = stays & (scaled >= tl.log(tl.load(min_p + row))) & (value > float("-inf"))
    tl.store(kept + first + token, stays.to(tl.uint8), mask=there)


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

    Takes 8 bytes a logit of scratch memory. Raises KernelArgumentError.
    """
    check_nucleus(logits, best, temperatures, top_k, min_p, top_p)
    rows, vocab = logits.shape
    device = logits.device
    lists = torch.empty((rows, 2, vocab), dtype=torch.int32, device=device)
    last_keys, last_tokens = torch.empty((2, rows), dtype=torch.int32, device=device)
    kept = torch.empty((rows, vocab), dtype=torch.bool, device=device)
    if logits.numel() == 0:
        return kept
    last_kept_kernel[(rows,)](
        last_keys, last_tokens, lists, logits, best, temperatures, top_k, min_p, top_p, vocab,
        LEAST_SCALED=LEAST_SCALED, BITS=WEIGHT_BITS, MOST_TURNS=_MOST_TURNS,
        BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    keep_kernel[(rows, triton.cdiv(vocab, _KEEP_BLOCK))](
        kept.view(torch.uint8), logits, best, temperatures, min_p, last_keys, last_tokens, vocab,
        BLOCK=_KEEP_BLOCK, num_warps=4,
    )  # fmt: skip
    return kept
