"""How busy each process was: the client by its own clock, the services by their metrics. Pure."""

import re
from collections.abc import Iterable, Mapping

_SECONDS = re.compile(r"^process_cpu_seconds_total (\S+)$", re.MULTILINE)


def read_cpu_seconds(expositions: Iterable[str]) -> dict[str, float]:
    """CPU seconds since their start, of "scheduler" and "executor" (all of them together); without those
    whose exposition does not tell."""
    totals: dict[str, float] = {}
    for exposition in expositions:
        if sample := _SECONDS.search(exposition):
            service = "scheduler" if "lorafleet_scheduler_" in exposition else "executor"
            totals[service] = totals.get(service, 0.0) + float(sample[1])
    return totals


def cpu_shares(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Cores in use on average over `seconds`, by process: what is all Python has no more than one."""
    if seconds <= 0:
        return {}
    return {name: (total - before.get(name, 0.0)) / seconds for name, total in after.items()}
