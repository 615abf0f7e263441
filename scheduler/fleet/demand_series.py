"""The series that an autoscaler reads."""

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.fleet.demand import Demand

PREFIX = "lorafleet_scheduler_"


class DemandCollector(Collector):
    """Gauges over what was last seen; `read` is called on the scraping thread."""

    def __init__(self, read: Callable[[], Demand]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        demand = self._read()
        for name, text, value in (
            ("seats", "Seats of executors that serve: not away, draining or cordoned.", demand.seats),
            ("seats_in_use", "Those in use, by all schedulers.", demand.seats_in_use),
            ("slots", "Adapter slots of executors that serve.", demand.slots),
            ("slots_in_use", "Those that sequences of any scheduler run or wait on.", demand.slots_in_use),
            (
                "queued_work_seconds",
                "How long what waits here takes at the rate at which requests run.",
                demand.queued_s,
            ),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        yield self._wanted(demand)

    def _wanted(self, demand: Demand) -> Metric:
        """Without an executor there is nothing to say, and no number that could take others away."""
        wanted = GaugeMetricFamily(
            PREFIX + "wanted_executors",
            "Executors that the work at hand would fill, as a fraction, by part: running counts all "
            "schedulers' work, so take the maximum over schedulers, and waiting this one's, so take the sum.",
            labels=["part"],
        )
        if demand.executors:
            wanted.add_metric(["running"], demand.running)
            wanted.add_metric(["waiting"], demand.waiting)
        return wanted
