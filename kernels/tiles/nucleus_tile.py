"""Pieces of the nucleus kernels: the order of tokens, weights, a step of narrowing. Needs triton."""

import triton
import triton.language as tl


@triton.jit
def key_of(value):
    """int32 that orders as float32 does; -0.0 as 0.0."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def order_of(key, token):
    """int64, different for every token of a row: the higher the earlier, of equal keys the lowest token."""
    return (key.to(tl.int64) << 32) + (2147483647 - token)


@triton.jit
def weight_of(value, largest, temperature, least, ONES: tl.constexpr, BITS: tl.constexpr):
    """What a token counts: 1, or the whole number that ../reference/nucleus.py makes of its probability."""
    if ONES:
        return (value > float("-inf")).to(tl.int32)
    else:
        scaled = (value.to(tl.float64) - largest) / temperature
        weight = (tl.exp(scaled) * (1 << BITS) + 0.5).to(tl.int64)
        return tl.where((scaled >= least) & (value > float("-inf")), weight, 0)


@triton.jit
def pivots_of(low, bottom, high, turn, PIVOTS: tl.constexpr):
    """int32 [PIVOTS], rising, in [low, high); the first is low.

    In turn 0 they lie ever closer from `bottom` up to `high`. Then values are spread evenly, which narrows
    fast where tokens are; in turn with keys, which end in 8 turns whatever the values are.
    """
    index = tl.arange(0, PIVOTS)
    rest = 1 - index.to(tl.float64) / PIVOTS
    first, last = value_of(low).to(tl.float64), value_of(high).to(tl.float64)
    if turn == 0:
        first = value_of(bottom).to(tl.float64)
        rest = rest * rest
    key = key_of((last - (last - first) * rest).to(tl.float32))
    if (turn > 0) & (turn % 2 == 0):
        key = (low + (high.to(tl.int64) - low) * index // PIVOTS).to(tl.int32)
    return tl.where(index == 0, low, tl.minimum(tl.maximum(key, low), high - 1))


@triton.jit
def narrowed(pivots, sums, high, above, target, least, most):
    """(low, high, above) of the one among the pivots' ranges in which the target is reached.

    sums: what lies above each pivot, up to `high`; above: what lies above `high`; least, most: the ends of
    the keys that there are in the whole range.
    """
    reached = above + sums >= target
    low = tl.max(tl.where(reached, pivots, -2147483648), 0)
    top = tl.min(tl.where(reached, high, pivots), 0)
    above += tl.max(tl.where(reached, 0, sums), 0)
    return tl.maximum(low, least - 1), tl.minimum(top, most), above


@triton.jit
def sums_above(
    logits, listed, first, count, pivots, last, largest, temperature, least,
    LISTED: tl.constexpr, ONES: tl.constexpr, BITS: tl.constexpr, NONE: tl.constexpr, PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(int64 [PIVOTS]: the weight above each pivot, least key, most key) of tokens above the lowest pivot.

    They are `count` of a list (LISTED) or those from `first` on; none behind `last` counts. Where an earlier
    filter set that, most blocks have none.
    """
    sums = tl.zeros([PIVOTS, BLOCK], tl.int32 if ONES else tl.int64)
    lowest = tl.min(pivots, 0)
    least_keys = tl.full([BLOCK], 2147483647, tl.int32)
    most_keys = tl.full([BLOCK], -2147483648, tl.int32)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        there = place < count
        token = first + place
        if LISTED:
            token = tl.load(listed + place, mask=there, other=0)
        value = tl.load(logits + token, mask=there, other=float("-inf"))
        key = key_of(value)
        there = there & (key > lowest) & (order_of(key, token) >= last)
        some = last <= NONE
        if last > NONE:
            some = tl.max(there.to(tl.int32), 0) > 0
        if some:
            weight = tl.where(there, weight_of(value, largest, temperature, least, ONES, BITS), 0)
            sums += tl.where(key[None, :] > pivots[:, None], weight[None, :], 0)
            least_keys = tl.minimum(least_keys, tl.where(there, key, 2147483647))
            most_keys = tl.maximum(most_keys, tl.where(there, key, -2147483648))
    return tl.sum(sums, 1).to(tl.int64), tl.min(least_keys, 0), tl.max(most_keys, 0)


@triton.jit
def list_inside(target, inside, logits, token, there, low, high, last):
    """Append those of the tokens whose keys are in (low, high] to the `inside` of a list; how many it has."""
    key = key_of(tl.load(logits + token, mask=there, other=float("-inf")))
    chosen = there & (key > low) & (key <= high) & (order_of(key, token) >= last)
    one = chosen.to(tl.int32)
    tl.store(target + inside + tl.cumsum(one, 0) - 1, token, mask=chosen)
    return inside + tl.sum(one, 0)


@triton.jit
def row_of(
    logits, best, temperatures, min_p, goals, row, vocab, LEAST_SCALED: tl.constexpr, ONES: tl.constexpr
):  # fmt: skip
    """(its logits, the largest, temperature, least scaled logit with weight, goal, whether it is cut)."""
    largest, temperature = tl.load(best + row).to(tl.float64), tl.load(temperatures + row)
    least = tl.maximum(tl.log(tl.load(min_p + row)), LEAST_SCALED)
    goal = tl.load(goals + row)
    cut = (tl.abs(largest) < float("inf")) & (goal < (vocab if ONES else 1))
    return logits + row * vocab, largest, temperature, least, goal, cut


@triton.jit
def cell_of(cells, turn, row, rows, PARTS: tl.constexpr, PIVOTS: tl.constexpr):
    """What a turn leaves of a row, int64: sums [PARTS, PIVOTS]; of each part, [3, PARTS], its least and most
    key and how many tokens it lists; pivots [PIVOTS]; the range's end, the weight above it, the target."""
    return cells + (turn * rows + row) * (PARTS * (PIVOTS + 3) + PIVOTS + 3)


@triton.jit
def narrowed_by_all(cell, parts, goal, FIRST, ONES: tl.constexpr, PARTS: tl.constexpr, PIVOTS: tl.constexpr):
    """(low, high, above, target) after a turn (FIRST: turn 0), from the sums of all parts."""
    index, part = tl.arange(0, PIVOTS), tl.arange(0, PARTS)
    there = part < parts
    each = tl.load(cell + part[:, None] * PIVOTS + index[None, :], mask=there[:, None], other=0)
    total = tl.sum(each, 0)
    ends = cell + PARTS * PIVOTS
    least = tl.min(tl.load(ends + part, mask=there, other=2147483647), 0)
    most = tl.max(tl.load(ends + PARTS + part, mask=there, other=-2147483648), 0)
    pivots = ends + 3 * PARTS
    state = pivots + PIVOTS
    high, above, target = tl.load(state).to(tl.int32), tl.load(state + 1), tl.load(state + 2)
    if FIRST:
        whole = tl.max(total, 0)
        wanted = goal.to(tl.int64) if ONES else tl.ceil(whole.to(tl.float64) * goal).to(tl.int64)
        target = tl.maximum(tl.minimum(wanted, whole), 1)
    low, high, above = narrowed(
        tl.load(pivots + index).to(tl.int32),
        total,
        high,
        above,
        target,
        least.to(tl.int32),
        most.to(tl.int32),
    )
    return low, high, above, target


@triton.jit
def sum_part(
    cell, part, logits, listed, first, count, low, bottom, high, above, target, turn, last, largest,
    temperature, least,
    LISTED: tl.constexpr, BITS: tl.constexpr, NONE: tl.constexpr, ONES: tl.constexpr, PARTS: tl.constexpr,
    PIVOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One part's share of a turn's cell; the first part writes what all have in common, too."""
    pivots = pivots_of(low, bottom, high, turn, PIVOTS)
    sums, least_key, most_key = sums_above(
        logits, listed, first, count, pivots, last, largest, temperature, least, LISTED, ONES, BITS, NONE,
        PIVOTS, BLOCK,
    )  # fmt: skip
    index = tl.arange(0, PIVOTS)
    tl.store(cell + part * PIVOTS + index, sums)
    ends = cell + PARTS * PIVOTS
    tl.store(ends + part, least_key.to(tl.int64))
    tl.store(ends + PARTS + part, most_key.to(tl.int64))
    tl.store(ends + 2 * PARTS + part, count.to(tl.int64))
    if part == 0:
        state = ends + 3 * PARTS + PIVOTS
        tl.store(ends + 3 * PARTS + index, pivots.to(tl.int64))
        tl.store(state, high.to(tl.int64))
        tl.store(state + 1, above)
        tl.store(state + 2, target)
