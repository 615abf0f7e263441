"""How often each adapter was copied into a slot or found there, read from the executors' metrics."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from lorafleet.bench.metrics import samples, scrape


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """By digest, over all executors: copies into a slot, and sequences that started with it in one.

    Only of adapters that an executor still has a copy of.
    """

    page_ins: Counter[str] = field(default_factory=Counter)
    slot_hits: Counter[str] = field(default_factory=Counter)


def read_counts(urls: Iterable[str]) -> SlotCounts:
    """`urls`: the executors' /metrics. Raises OSError."""
    counts = SlotCounts()
    kinds = {
        "lorafleet_executor_adapter_page_ins_total": counts.page_ins,
        "lorafleet_executor_adapter_slot_hits_total": counts.slot_hits,
    }
    for url in urls:
        for sample in samples(scrape(url)):
            if sample.name in kinds:
                kinds[sample.name][sample.labels["digest"]] += int(sample.value)
    return counts
