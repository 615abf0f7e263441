"""A Prometheus histogram for what happens with every token."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LoopHistogram(Collector):
    """Filled by the event loop alone, so that it needs no lock: the library's takes five times as long.

    It is read on other threads, whose sum may lack the last observation.
    """

    def __init__(
        self, name: str, documentation: str, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = (*buckets, float("inf"))
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, amount: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, amount)] += times
        self._sum += amount * times

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation)
        counts = accumulate(list(self._counts))
        names = map(floatToGoString, self._bounds)
        family.add_metric([], list(zip(names, counts, strict=True)), self._sum)
        yield family
