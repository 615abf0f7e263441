"""How executors used their slots while a play ran, read from their metrics before and after. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lorafleet.bench.metrics import samples

_PREFIX = "lorafleet_executor_"
_COUNTED = {
    "slot_hits_total": "slot_hits",
    "page_ins_total": "page_ins",
    "adapter_load_seconds_count": "loads",
    "adapter_load_seconds_sum": "load_seconds",
    "page_in_seconds_count": "timed_page_ins",
    "page_in_seconds_sum": "page_in_seconds",
    "preemptions_total": "preemptions",
    "slots": "slots",
}


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Between two readings, over all executors.

    A load is store to host memory, a page-in host memory to slot; times are means in milliseconds, None when
    there was none, or when the executor does not time it.
    """

    slots: int
    slot_hits: int
    page_ins: int
    loads: int
    preemptions: int
    load_ms: float | None
    page_in_ms: float | None


def read_totals(expositions: Iterable[str]) -> dict[str, float]:
    """Sums over all executors, by the names of _COUNTED; empty when there are no expositions."""
    totals: dict[str, float] = {}
    for exposition in expositions:
        for sample in samples(exposition):
            if name := _COUNTED.get(sample.name.removeprefix(_PREFIX)):
                totals[name] = totals.get(name, 0.0) + sample.value
    return totals


def slot_use(before: Mapping[str, float], after: Mapping[str, float]) -> SlotUse | None:
    """None when the executors' metrics are not known."""
    if not after:
        return None

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    def mean_ms(seconds: str, count: str) -> float | None:
        return 1000 * grown(seconds) / grown(count) if grown(count) else None

    return SlotUse(
        slots=int(after.get("slots", 0)),
        slot_hits=int(grown("slot_hits")),
        page_ins=int(grown("page_ins")),
        loads=int(grown("loads")),
        preemptions=int(grown("preemptions")),
        load_ms=mean_ms("load_seconds", "loads"),
        page_in_ms=mean_ms("page_in_seconds", "timed_page_ins"),
    )
