"""What services' /metrics say, and how busy each process was between two readings of them."""

import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from lorafleet.bench.errors import BenchError

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

# Services are close: a proxy for the rest of the world is not asked.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_TIMEOUT_S = 10


def scrape(url: str) -> str:
    """The exposition of one service, in the Prometheus text format. Raises OSError."""
    with _OPENER.open(url, timeout=_TIMEOUT_S) as response:
        return str(response.read().decode())


def samples(exposition: str) -> "Iterator[Sample]":
    """Raises BenchError where the package that reads them is absent, as with the client alone."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ModuleNotFoundError as error:
        needed = f"reading metrics needs the package {error.name}: pip install 'lorafleet[service]'"
        raise BenchError(needed) from error
    for family in text_string_to_metric_families(exposition):
        yield from family.samples


def read_cpu_seconds(expositions: Iterable[str]) -> dict[str, float]:
    """CPU seconds since their start, of "scheduler" and "executor" (all of them together); without those
    whose exposition does not tell."""
    totals: dict[str, float] = {}
    for exposition in expositions:
        service = "scheduler" if "lorafleet_scheduler_" in exposition else "executor"
        for sample in samples(exposition):
            if sample.name == "process_cpu_seconds_total":
                totals[service] = totals.get(service, 0.0) + sample.value
    return totals


def cpu_shares(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Cores in use on average over `seconds`, by process: what is all Python has no more than one."""
    if seconds <= 0:
        return {}
    return {name: (total - before.get(name, 0.0)) / seconds for name, total in after.items()}
