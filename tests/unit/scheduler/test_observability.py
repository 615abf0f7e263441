import json
import logging
import sys

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lorafleet.doors.logs import JsonFormatter, TextFormatter
from scheduler.fleet.state import Phase
from scheduler.metrics import OTHER, BoundedLabel, Metrics


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("scheduler.x", logging.INFO, "x.py", 1, message, (), None)
    for key, value in fields.items():
        setattr(made, key, value)
    return made


def test_later_names_share_one_label_value() -> None:
    label = BoundedLabel(2)
    assert [label(name) for name in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]


def test_many_names_make_few_series_and_valid_text() -> None:
    """A label holds quotes and newlines, and the series do not grow with the names."""
    registry = CollectorRegistry()
    metrics = Metrics(registry, max_label_values=5)
    for number in range(200):
        metrics.accepted(f'ten"ant\n{number}', "x" * 1000 + str(number), 3)
        metrics.generated(f'ten"ant\n{number}', "x" * 1000 + str(number), 7)
    families = {f.name: f for f in text_string_to_metric_families(generate_latest(registry).decode())}
    accepted = [
        s for s in families["lorafleet_scheduler_accepted_requests"].samples if s.name.endswith("_total")
    ]
    assert len(accepted) == 6
    assert sum(sample.value for sample in accepted) == 200
    other = [sample for sample in accepted if sample.labels == {"tenant": OTHER, "adapter": OTHER}]
    assert other[0].value == 195


def test_executors_by_state_counts_every_state() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.executors(["ready", "ready", "hung"])
    name = "lorafleet_scheduler_executors"
    counts = {phase: registry.get_sample_value(name, {"state": phase.name.lower()}) for phase in Phase}
    assert counts == {**dict.fromkeys(Phase, 0), Phase.READY: 2, Phase.HUNG: 1}


def test_json_lines_carry_the_extra_fields() -> None:
    entry = json.loads(JsonFormatter().format(record("ended", request_id="r\n1", tokens=3)))
    assert (entry["message"], entry["request_id"], entry["tokens"]) == ("ended", "r\n1", 3)
    assert (entry["level"], entry["logger"]) == ("info", "scheduler.x")


def test_text_lines_carry_them_too_on_one_line() -> None:
    line = TextFormatter().format(record("ended", request_id="r\n1"))
    assert line.endswith("INFO    scheduler.x: ended request_id='r\\n1'")


def test_exceptions_are_logged_whole() -> None:
    try:
        raise ValueError("inner")
    except ValueError:
        failed = record("failed", request_id="r1")
        failed.exc_info = sys.exc_info()
    assert "ValueError: inner" in json.loads(JsonFormatter().format(failed))["exception"]
    lines = TextFormatter().format(failed).splitlines()
    assert lines[0].endswith("failed request_id='r1'")
    assert lines[-1] == "ValueError: inner"


def test_versions_that_come_and_go_leave_no_series() -> None:
    """Two thousand of them, and names that no client should choose."""
    registry = CollectorRegistry()
    metrics = Metrics(registry, max_label_values=10)

    def series() -> list[tuple[str, str]]:
        return [
            (sample.labels["adapter"], sample.labels["version"])
            for family in registry.collect()
            for sample in family.samples
            if sample.name == "lorafleet_scheduler_version_requests_total"
        ]

    for number in range(2000):
        metrics.version_served("acme/x", f"sha256:{number}")
        assert series() == [("acme/x", f"sha256:{number}")]
        metrics.version_gone("acme/x", f"sha256:{number}")
        metrics.version_gone("acme/never", "sha256:seen")
    assert series() == []
    for number in range(30):
        metrics.version_served("acme/x", f"sha256:{number}")
        metrics.version_served('we"ird\n' * 100, f"sha256:{number}")
    assert len(series()) == 11 and ("other", "other") in series()
    assert list(text_string_to_metric_families(generate_latest(registry).decode()))


def test_an_adapters_series_end_with_its_last_version_and_make_room() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, max_label_values=10)

    def serve(adapter: str, digest: str, tenant: str = "acme") -> None:
        metrics.version_served(adapter, digest)
        metrics.accepted(tenant, adapter, 5)
        metrics.cached(tenant, adapter, 2)
        metrics.generated(tenant, adapter, 1)

    def adapters() -> set[str]:
        families = text_string_to_metric_families(generate_latest(registry).decode())
        return {
            sample.labels["adapter"]
            for family in families
            for sample in family.samples
            if "adapter" in sample.labels
        }

    for number in range(500):
        serve(f"acme/{number}", "sha256:a")
        serve(f"acme/{number}", "sha256:b", tenant="other-tenant")
        metrics.version_gone(f"acme/{number}", "sha256:a")
        assert adapters() == {f"acme/{number}"}
        metrics.version_gone(f"acme/{number}", "sha256:b")
        metrics.version_gone(f"acme/{number}", "sha256:b")
        assert adapters() == set()
    for number in range(12):
        serve(f"acme/{number}", "sha256:a")
    assert adapters() == {*(f"acme/{number}" for number in range(10)), "other"}
    for number in range(12):
        metrics.version_gone(f"acme/{number}", "sha256:a")
    assert adapters() == {"other"}
    serve("acme/11", "sha256:a")
    assert adapters() == {"acme/11", "other"}
