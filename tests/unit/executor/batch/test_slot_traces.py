"""How many page-ins the slot table takes on traces of uses, beside a table of the least recently used."""

import random
from collections.abc import Iterable, Sequence

import pytest

from executor.batch.slots import SlotTable

NUM_ADAPTERS = 1000
NUM_USES = 10_000
WARM = NUM_USES // 4  # by then every slot is full, and the table knows something


def by_zipf(exponent: float, *, seed: int) -> list[int]:
    """Independent uses of 1,000 adapters; exponent 0: all equally popular."""
    weights = [1 / rank**exponent for rank in range(1, NUM_ADAPTERS + 1)]
    return random.Random(seed).choices(range(NUM_ADAPTERS), weights, k=NUM_USES)


def page_ins(num_slots: int, uses: Iterable[int]) -> list[bool]:
    """Of each use: whether it took one. Sequences end before the next begins."""
    table = SlotTable(num_slots)
    missed = []
    for number in uses:
        digest = str(number)
        slot = table.find(digest)
        missed.append(slot is None)
        if slot is None:
            assigned = table.assign(digest)
            assert assigned is not None
            slot = assigned.slot
            table.loaded(slot)
        table.acquire(slot)
        table.release(slot)
    table.check()
    return missed


def page_ins_by_recency(num_slots: int, uses: Iterable[int]) -> list[bool]:
    held: dict[int, None] = {}
    missed = []
    for number in uses:
        missed.append(number not in held)
        held.pop(number, None)
        held[number] = None
        if len(held) > num_slots:
            del held[next(iter(held))]
    return missed


def saved(num_slots: int, uses: Sequence[int], first: int = 0) -> float:
    """Share of the page-ins by recency that the table does without, from use `first` on."""
    return 1 - sum(page_ins(num_slots, uses)[first:]) / sum(page_ins_by_recency(num_slots, uses)[first:])


@pytest.mark.parametrize(("num_slots", "least"), [(32, 0.15), (128, 0.20)])
def test_zipf_takes_fewer_page_ins_than_by_recency(num_slots: int, least: float) -> None:
    assert saved(num_slots, by_zipf(1.0, seed=1), first=WARM) >= least


@pytest.mark.parametrize("num_slots", [32, 128])
def test_uniform_uses_take_no_more_page_ins_than_by_recency(num_slots: int) -> None:
    # Every table has the same share of hits here; what is left is the trace's noise.
    assert saved(num_slots, by_zipf(0.0, seed=2), first=WARM) >= -0.01


@pytest.mark.parametrize("num_slots", [32, 128])
def test_it_recovers_when_other_adapters_become_popular(num_slots: int) -> None:
    others = [(number + 500) % NUM_ADAPTERS for number in by_zipf(1.0, seed=4)]
    uses = [*by_zipf(1.0, seed=3), *others]
    assert saved(num_slots, uses, first=NUM_USES) >= 0.10, "the change itself costs too much"
    half = NUM_USES + NUM_USES // 2
    assert saved(num_slots, uses, first=half) >= 0.20


@pytest.mark.parametrize("num_slots", [32, 128])
def test_a_scan_does_not_push_out_what_is_popular(num_slots: int) -> None:
    """Every fifth thousand uses goes half to adapters that come once each."""
    uses = []
    for index, number in enumerate(by_zipf(1.0, seed=5)):
        uses.append(number)
        if index % 5000 >= 4000:
            uses.append(NUM_ADAPTERS + index)
    assert saved(num_slots, uses) >= 0.12
