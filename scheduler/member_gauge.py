"""A Prometheus gauge of executors that come and go: its series are those of when it is read."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class MemberGauge(Collector):
    """Without series before `follow`."""

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._values: Callable[[], Mapping[str, float]] = dict
        registry.register(self)

    def follow(self, values: Callable[[], Mapping[str, float]]) -> None:
        """They are asked for, by executor, whenever the metrics are read, on the thread that reads."""
        self._values = values

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(self._name, self._documentation, labels=["executor"])
        for executor, value in self._values().items():
            family.add_metric([executor], value)
        yield family
