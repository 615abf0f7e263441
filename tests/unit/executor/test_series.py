"""Series of adapters come with their copies and go with them."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from executor.batch.batcher import StepPlan
from executor.metrics import Metrics


def test_adapters_that_come_and_go_leave_no_series() -> None:
    """Two thousand loaded, used and unloaded."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)

    def series() -> set[str]:
        families = text_string_to_metric_families(generate_latest(registry).decode())
        return {f"{sample.name}{sample.labels}" for family in families for sample in family.samples}

    def load(digest: str) -> None:
        metrics.paged_in(digest)
        metrics.step_done(StepPlan(slot_hits=[digest]), generated=0, seconds=0.0)

    load("sha256:first")
    metrics.adapter_gone("sha256:first")
    before = series()
    for number in range(2000):
        load(f"sha256:{number}")
        if number % 100 == 0:
            assert len(series()) > len(before)
        metrics.adapter_gone(f"sha256:{number}")
        metrics.adapter_gone("sha256:never-seen")
    assert series() == before
