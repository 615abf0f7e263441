"""How often each adapter was copied into a slot or found there, read from the executors' metrics."""

import re
import urllib.request
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

_SAMPLE = re.compile(r'lorafleet_executor_adapter_(page_ins|slot_hits)_total\{digest="([^"]*)"\} (\S+)')
# Executors are on this machine: a proxy for the rest of the world is not asked.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


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
    for url in urls:
        with _OPENER.open(url, timeout=10) as response:
            add_samples(counts, response.read().decode())
    return counts


def add_samples(counts: SlotCounts, exposition: str) -> None:
    """`exposition`: in the Prometheus text format."""
    kinds = {"page_ins": counts.page_ins, "slot_hits": counts.slot_hits}
    for line in exposition.splitlines():
        if sample := _SAMPLE.fullmatch(line):
            what, digest, value = sample.groups()
            kinds[what][digest] += int(float(value))
