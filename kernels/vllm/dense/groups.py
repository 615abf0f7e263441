"""Device code: whose rows a program has, from the reference API's description of a step. Needs triton.

The order has the rows of one slot after each other: group g is places [starts[g], starts[g] + counts[g]),
of slot lora_ids[g]. Groups that are there come first; slot -1 is that of the rows without an adapter.
What the order holds beyond the step's rows is of an earlier step: no group has these places.
"""

import triton
import triton.language as tl


@triton.jit
def load_group(
    counts, starts, lora_ids, group, num_rows, MAX_LORAS: tl.constexpr, NUM_IDS: tl.constexpr
):  # fmt: skip
    """(slot, first place, rows); rows is 0 where there is no such group, or one that cannot be."""
    there = group < NUM_IDS
    slot = tl.load(lora_ids + group, mask=there, other=-1)
    start = tl.load(starts + group, mask=there, other=0)
    count = tl.load(counts + group, mask=there, other=0)
    possible = (slot < MAX_LORAS) & (start >= 0) & (count >= 0) & (start + count <= num_rows)
    return tl.where(possible, slot, -1), start, tl.where(possible, count, 0)


@triton.jit
def groups_of(
    counts, starts, first, rows: tl.constexpr, NUM_IDS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """(number of the first group, number of groups) with any of the places [first, first + rows)."""
    lane = tl.arange(0, LANES)
    count = tl.load(counts + lane, mask=lane < NUM_IDS, other=0)
    start = tl.load(starts + lane, mask=lane < NUM_IDS, other=0)
    before = (count > 0) & (start + count <= first)
    here = (count > 0) & (start + count > first) & (start < first + rows)
    both = tl.sum(before.to(tl.int32) + here.to(tl.int32) * 65536, 0)  # one sum for two numbers of 16 bits
    return both % 65536, both // 65536


@triton.jit
def rows_of_groups(counts, NUM_IDS: tl.constexpr, LANES: tl.constexpr):
    """How many rows the order lists."""
    lane = tl.arange(0, LANES)
    return tl.sum(tl.load(counts + lane, mask=lane < NUM_IDS, other=0), 0)


@triton.jit
def load_member(
    counts, starts, lora_ids, place, num_rows,
    MAX_LORAS: tl.constexpr, NUM_IDS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    ROWS_A_SLOT: tl.constexpr,
):  # fmt: skip
    """(slot, first place, members, number) of the team that a place is in; members is 0 for no team.

    Up to ROWS neighbouring places of one slot are a team and share its work. Those of a slot with no more
    rows than ROWS_A_SLOT work alone: the device's choice, slot by slot.
    """
    group, there = groups_of(counts, starts, place, 1, NUM_IDS, LANES)
    slot, start, count = load_group(counts, starts, lora_ids, group, num_rows, MAX_LORAS, NUM_IDS)
    offset = place - start
    alone = count <= ROWS_A_SLOT
    number = tl.where(alone, 0, offset % ROWS)
    members = tl.where(alone, 1, tl.minimum(count - offset + number, ROWS))
    return slot, place - number, tl.where((there > 0) & (offset < count), members, 0), number


@triton.jit
def load_entry(
    counts, starts, lora_ids, entry, num_rows,
    MAX_LORAS: tl.constexpr, NUM_IDS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    ROWS_A_SLOT: tl.constexpr,
):  # fmt: skip
    """(slot, first place, members) of the entry-th team, or row by itself; members is 0 beyond the last.

    As load_member, one entry a team: those with work come first, and nothing waits behind idle programs.
    """
    lane = tl.arange(0, LANES)
    listed = lane < NUM_IDS
    slots = tl.load(lora_ids + lane, mask=listed, other=-1)
    count = tl.load(counts + lane, mask=listed, other=0)
    entries = tl.where(count <= ROWS_A_SLOT, count, (count + (ROWS - 1)) // ROWS)
    entries = tl.where(slots >= 0, entries, 0)
    done = listed & (tl.cumsum(entries, 0) <= entry)
    both = tl.sum(tl.where(done, entries * 65536 + 1, 0), 0)  # one sum for two numbers of 16 bits
    group, offset = both % 65536, entry - both // 65536
    slot, start, count = load_group(counts, starts, lora_ids, group, num_rows, MAX_LORAS, NUM_IDS)
    alone = count <= ROWS_A_SLOT
    offset = tl.where(alone, offset, offset * ROWS)
    members = tl.where(alone, 1, tl.minimum(count - offset, ROWS))
    return slot, start + offset, tl.where(count > offset, members, 0)


@triton.jit
def load_work(work, entry, MOST: tl.constexpr):
    """(slot, first place, members, number, row) of an entry of `kernels.vllm.dense.work`."""
    entry += work
    slot, first, members = tl.load(entry), tl.load(entry + MOST), tl.load(entry + 2 * MOST)
    return slot, first, members, tl.load(entry + 3 * MOST), tl.load(entry + 4 * MOST).to(tl.int64)


@triton.jit
def load_places(order, first, begin, end, ROWS: tl.constexpr):
    """(int64 [ROWS] row numbers of the places from `first`, which of them are in [begin, end))."""
    place = first + tl.arange(0, ROWS)
    mine = (place >= begin) & (place < end)
    return tl.load(order + place, mask=mine, other=0).to(tl.int64), mine
