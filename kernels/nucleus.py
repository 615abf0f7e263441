"""top_k, min_p and top_p without sorting the vocabulary. The truth is kernels/reference/nucleus.py.

A filter keeps the tokens before which less than a target lies, in tokens or in weight. The last of them is
found by narrowing a range of keys (logits as integers), sixteenfold a turn: what lies above each of sixteen
pivots is summed up by several programs a row, and each program of the next turn adds up their sums, sees in
which range the target falls and lists its own tokens there. When few are left, one program a row ends it.
Weights are integers, so no order of summing shows.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching.launch import Launch
from kernels.reference.nucleus import LEAST_SCALED, WEIGHT_BITS, check_nucleus
from kernels.tiles.nucleus_tile import (
    cell_of,
    key_of,
    list_inside,
    narrowed,
    narrowed_by_all,
    order_of,
    pivots_of,
    row_of,
    sum_part,
    sums_above,
    value_of,
    weight_of,
)

_PIVOTS = 16
# By several programs a row: of 128256 tokens the last turn lists one or two thousand, and leaves a hundred.
_TURNS = 3
# Every second turn cuts a range of 2^32 keys to a sixteenth: more than that never come.
_MOST_TURNS = 24
# Parts of a row, one program each: enough for 132 multiprocessors, in whole blocks.
_MOST_PARTS, _LEAST_PARTS = 64, 8
_PROGRAMS = 2048
_SUM_BLOCK, _LIST_BLOCK = 128, 1024
_WARPS = 4
_FEW_BLOCK, _FEW_WARPS = 1024, 16
_KEEP_BLOCK = 1024
# Where float32 over a temperature may be minus infinity.
_TINY = 1e-200
_NONE = -(1 << 63)


@triton.jit(do_not_specialize=["vocab", "length"])
def begin_kernel(
    cells, logits, best, temperatures, min_p, goals, last_orders, vocab, length,
    LEAST_SCALED: tl.constexpr, BITS: tl.constexpr, NONE: tl.constexpr, ONES: tl.constexpr,
    PARTS: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (part, row), turn 0: sum up the part's tokens."""
    part, row, rows = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    logits, largest, temperature, least, _, cut = row_of(
        logits, best, temperatures, min_p, goals, row, vocab, LEAST_SCALED, ONES
    )
    if not cut:
        return
    last = tl.load(last_orders + row)
    high = key_of(largest.to(tl.float32))
    # Below it tokens have no weight. One less: the value was rounded.
    bottom = key_of((largest + (least - 1) * temperature).to(tl.float32)) - 1
    bottom = tl.minimum(tl.maximum(bottom.to(tl.int64), (last >> 32) - 1).to(tl.int32), high - 1)
    low = bottom
    if ONES:
        low = key_of(tl.full((), float("-inf"), tl.float32))
    zero = tl.zeros((), tl.int64)
    sum_part(
        cell_of(cells, 0, row, rows, PARTS, PIVOTS), part, logits, logits, part * length,
        tl.minimum(length, vocab - part * length), low, bottom, high, zero, zero, 0, last, largest,
        temperature, least, False, BITS, NONE, ONES, PARTS, PIVOTS, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["vocab", "length", "turn"])
def narrow_kernel(
    cells, lists, logits, best, temperatures, min_p, goals, last_orders, vocab, length, turn,
    LEAST_SCALED: tl.constexpr, BITS: tl.constexpr, NONE: tl.constexpr, ONES: tl.constexpr,
    PARTS: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr, LIST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (part, row), turn 1 and later: list the part's tokens in the range that the turn before left,
    and sum them up. lists is [2, rows, vocab], filled in turn; each part's list is where its tokens were."""
    part, row, rows = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    logits, largest, temperature, least, goal, cut = row_of(
        logits, best, temperatures, min_p, goals, row, vocab, LEAST_SCALED, ONES
    )
    if not cut:
        return
    last = tl.load(last_orders + row)
    before = cell_of(cells, turn - 1, row, rows, PARTS, PIVOTS)
    low, high, above, target = narrowed_by_all(
        before, tl.num_programs(0), goal, turn == 1, ONES, PARTS, PIVOTS
    )
    first = part * length
    source = lists + ((turn + 1) % 2 * rows + row) * vocab + first
    listed = lists + (turn % 2 * rows + row) * vocab + first
    count = tl.minimum(length, vocab - first)
    if turn > 1:
        count = tl.load(before + PARTS * (PIVOTS + 2) + part).to(tl.int32)
    inside = 0
    for start in range(0, count, LIST_BLOCK):
        place = start + tl.arange(0, LIST_BLOCK)
        there = place < count
        token = first + place
        if turn > 1:
            token = tl.load(source + place, mask=there, other=0)
        inside = list_inside(listed, inside, logits, token, there, low, high, last)
    tl.debug_barrier()  # the list is there for all threads
    sum_part(
        cell_of(cells, turn, row, rows, PARTS, PIVOTS), part, logits, listed, first, inside, low, low, high,
        above, target, turn, last, largest, temperature, least, True, BITS, NONE, ONES, PARTS, PIVOTS, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["vocab", "length"])
def last_kept_kernel(
    last_orders, cells, lists, logits, best, temperatures, min_p, goals, vocab, length,
    LEAST_SCALED: tl.constexpr, BITS: tl.constexpr, NONE: tl.constexpr, ONES: tl.constexpr,
    PARTS: tl.constexpr, PIVOTS: tl.constexpr, TURNS: tl.constexpr, MOST_TURNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): the last token that the filter leaves, from what TURNS turns listed."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    logits, largest, temperature, least, goal, cut = row_of(
        logits, best, temperatures, min_p, goals, row, vocab, LEAST_SCALED, ONES
    )
    if not cut:
        return
    last = tl.load(last_orders + row)
    before = cell_of(cells, TURNS - 1, row, rows, PARTS, PIVOTS)
    parts = tl.cdiv(vocab, length)
    low, high, above, target = narrowed_by_all(before, parts, goal, False, ONES, PARTS, PIVOTS)
    part = tl.arange(0, PARTS)
    counts = tl.load(before + PARTS * (PIVOTS + 2) + part, mask=part < parts, other=0).to(tl.int32)
    ends, all_listed = tl.cumsum(counts, 0), tl.sum(counts, 0)
    source = lists + ((TURNS - 1) % 2 * rows + row) * vocab
    listed = lists + (TURNS % 2 * rows + row) * vocab
    count = tl.zeros((), tl.int32)
    for start in range(0, all_listed, BLOCK):
        place = start + tl.arange(0, BLOCK)
        passed = ends[:, None] <= place[None, :]  # parts whose lists end before this place of all together
        at = tl.sum(passed.to(tl.int32), 0) * length + place - tl.sum(tl.where(passed, counts[:, None], 0), 0)
        token = tl.load(source + at, mask=place < all_listed, other=0)
        count = list_inside(listed, count, logits, token, place < all_listed, low, high, last)
    turn = tl.full((), TURNS, tl.int32)
    while (low + 1 < high) & (turn < MOST_TURNS):
        tl.debug_barrier()  # the list is there for all threads
        source = lists + (turn % 2 * rows + row) * vocab
        listed = lists + ((turn + 1) % 2 * rows + row) * vocab
        pivots = pivots_of(low, low, high, turn, PIVOTS)
        sums, least_key, most_key = sums_above(
            logits, source, 0, count, pivots, last, largest, temperature, least, True, ONES, BITS, NONE,
            PIVOTS, BLOCK,
        )  # fmt: skip
        low, high, above = narrowed(pivots, sums, high, above, target, least_key, most_key)
        inside = 0
        for start in range(0, count, BLOCK):
            place = start + tl.arange(0, BLOCK)
            token = tl.load(source + place, mask=place < count, other=0)
            inside = list_inside(listed, inside, logits, token, place < count, low, high, last)
        count = inside
        turn += 1
    tl.debug_barrier()
    # What is left has one value; the list is in the order of the token ids.
    one = weight_of(value_of(high), largest, temperature, least, ONES, BITS).to(tl.int64)
    more = tl.minimum(tl.cdiv(target - above, tl.maximum(one, 1)), count.to(tl.int64))
    token = tl.load(lists + (turn % 2 * rows + row) * vocab + tl.maximum(more - 1, 0))
    tl.store(last_orders + row, order_of(high, token))


@triton.jit(do_not_specialize=["vocab"])
def keep_kernel(
    kept, logits, best, temperatures, min_p, last_orders, vocab, TINY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (part, row): whether each token of the part stays."""
    row = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = token < vocab
    first = row.to(tl.int64) * vocab
    value = tl.load(logits + first + token, mask=there, other=float("-inf"))
    stays = (order_of(key_of(value), token) >= tl.load(last_orders + row)) & (value > float("-inf"))
    temperature, share = tl.load(temperatures + row), tl.load(min_p + row)
    if (share > 0) | (temperature < TINY):
        scaled = (value.to(tl.float64) - tl.load(best + row).to(tl.float64)) / temperature
        stays = stays & (scaled >= tl.log(share)) & (scaled > float("-inf"))
    tl.store(kept + first + token, stays.to(tl.uint8), mask=there)


@dataclass(frozen=True, slots=True)
class _Search:
    """The kernels that find the last token that one filter leaves."""

    begin: Launch
    narrow: Launch
    last_kept: Launch

    @classmethod
    def make(cls, ones: bool) -> "_Search":
        common = {
            "LEAST_SCALED": LEAST_SCALED, "BITS": WEIGHT_BITS, "NONE": _NONE, "ONES": ones,
            "PARTS": _MOST_PARTS, "PIVOTS": _PIVOTS,
        }  # fmt: skip
        several = {**common, "BLOCK": _SUM_BLOCK}
        one = {**common, "BLOCK": _FEW_BLOCK, "TURNS": _TURNS, "MOST_TURNS": _MOST_TURNS}
        return cls(
            Launch(begin_kernel, several, {"num_warps": _WARPS}),
            Launch(narrow_kernel, {**several, "LIST_BLOCK": _LIST_BLOCK}, {"num_warps": _WARPS}),
            Launch(last_kept_kernel, one, {"num_warps": _FEW_WARPS}),
        )


@lru_cache(maxsize=64)
def _launches(device: torch.device, alignments: tuple[int | None, ...]) -> tuple[_Search, _Search, Launch]:
    """top_k's, top_p's and the last kernel, for inputs of this form: all that Triton specialises on."""
    keep = Launch(keep_kernel, {"TINY": _TINY, "BLOCK": _KEEP_BLOCK}, {"num_warps": 4})
    return _Search.make(True), _Search.make(False), keep


def _find_last(
    search: _Search,
    last_orders: Tensor,
    logits: Tensor,
    best: Tensor,
    temperatures: Tensor,
    min_p: Tensor,
    goals: Tensor,
) -> None:
    """Bring last_orders, the last of what is kept so far, down to what `goals` leaves of that."""
    rows, vocab = logits.shape
    parts = max(_LEAST_PARTS, min(_MOST_PARTS, _PROGRAMS // rows))
    length = triton.cdiv(vocab, parts * _LIST_BLOCK) * _LIST_BLOCK
    words = _MOST_PARTS * (_PIVOTS + 3) + _PIVOTS + 3
    cells = torch.empty((_TURNS, rows, words), dtype=torch.int64, device=logits.device)
    lists = torch.empty((2, rows, vocab), dtype=torch.int32, device=logits.device)
    grid, row = (triton.cdiv(vocab, length), rows), (logits, best, temperatures, min_p, goals)
    search.begin(grid, cells, *row, last_orders, vocab, length)
    for turn in range(1, _TURNS):
        search.narrow(grid, cells, lists, *row, last_orders, vocab, length, turn)
    search.last_kept((rows,), last_orders, cells, lists, *row, vocab, length)


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
    top_k         int64 [rows], at least 1; vocab or more: off. None: off in all rows, which saves launches
    min_p         float64 [rows], 0: off
    top_p         float64 [rows], above 0; 1 or more: off. None: as top_k's

    Takes 8 bytes a logit of scratch memory. Raises KernelArgumentError.
    """
    check_nucleus(logits, best, temperatures, top_k, min_p, top_p)
    rows, vocab = logits.shape
    kept = torch.empty((rows, vocab), dtype=torch.bool, device=logits.device)
    if logits.numel() == 0:
        return kept
    given = (logits, best, temperatures, top_k, min_p, top_p)
    alignments = tuple(None if each is None else each.data_ptr() % 16 for each in given)
    by_count, by_weight, keep = _launches(logits.device, alignments)
    last_orders = torch.full((rows,), _NONE, dtype=torch.int64, device=logits.device)
    if top_k is not None:
        _find_last(by_count, last_orders, logits, best, temperatures, min_p, top_k)
    if top_p is not None:
        _find_last(by_weight, last_orders, logits, best, temperatures, min_p, top_p)
    keep(
        (triton.cdiv(vocab, _KEEP_BLOCK), rows), kept.view(torch.uint8), logits, best, temperatures, min_p,
        last_orders, vocab,
    )  # fmt: skip
    return kept
