"""What is measured of estimates: whom they refused, and how far they were off."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

RATIO_BUCKETS = (0.1, 0.2, 0.35, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
REASONS = ("DEADLINE_UNREACHABLE", "QUEUE_TOO_LONG")


class EstimateMetrics:
    """A part of `scheduler.metrics.Metrics`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._refused = Counter(
            "lorafleet_scheduler_refused_by_estimate",
            "Requests refused at once for what they were expected to take: longer than their deadline "
            "(DEADLINE_UNREACHABLE), or than --max-queue-time before they start (QUEUE_TOO_LONG).",
            ["reason"],
            registry=registry,
        )
        for reason in REASONS:
            self._refused.labels(reason)  # An alert on its increase needs the 0.
        self._ratio = Histogram(
            "lorafleet_scheduler_estimate_ratio",
            "Time until the first token, by what was expected when the request came; of those that found no "
            "free seat.",
            buckets=RATIO_BUCKETS,
            registry=registry,
        )
        self._factor = Gauge(
            "lorafleet_scheduler_estimate_factor",
            "What estimates (of first_token, end) are multiplied by: learned, so that they are right on "
            "average.",
            ["of"],
            registry=registry,
        )
        self._margin = Gauge(
            "lorafleet_scheduler_estimate_margin",
            "What estimates (of first_token, end) are multiplied by before a request is refused for one: "
            "learned, so that one of ten is faster at most.",
            ["of"],
            registry=registry,
        )

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def began(self, ratio: float) -> None:
        """A first token came after so many times what was expected."""
        self._ratio.observe(ratio)

    def learned(self, of: str, factor: float, margin: float) -> None:
        """`of`: "first_token" or "end"."""
        self._factor.labels(of).set(factor)
        self._margin.labels(of).set(margin)
