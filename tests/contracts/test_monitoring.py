"""Alerts and the dashboard ask for metrics, and for labels of them, that the services have."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from executor.events import EngineInfo, Status
from executor.metrics import Metrics as ExecutorMetrics
from executor.metrics import Snapshot, StateCollector
from scheduler.fleet.demand import Demand
from scheduler.fleet.demand_series import DemandCollector
from scheduler.fleet.state import CLOSED, Phase
from scheduler.loop_histogram import LoopHistogram
from scheduler.member_gauge import MemberGauge
from scheduler.metrics import Metrics as SchedulerMetrics

FOLDER = Path(__file__).parents[2] / "deploy/monitoring"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
OF_EVERY_SERIES = {"instance", "le"}


@pytest.fixture(scope="module")
def exported() -> Mapping[str, set[str]]:
    """The labels of each series, by its full name."""
    registry = CollectorRegistry()
    found: dict[str, set[str]] = {}
    scheduler = SchedulerMetrics(registry)
    for metrics in (scheduler, scheduler.estimates, scheduler.ledger, ExecutorMetrics(registry)):
        for instrument in vars(metrics).values():
            if isinstance(instrument, MetricWrapperBase):
                for family in instrument.describe():
                    for suffix in SUFFIXES[family.type]:
                        found[family.name + suffix] = set(instrument._labelnames)
            elif isinstance(instrument, LoopHistogram):
                for family in instrument.collect():
                    found |= {family.name + suffix: set() for suffix in SUFFIXES["histogram"]}
            elif isinstance(instrument, MemberGauge):
                found |= {family.name: {"executor"} for family in instrument.collect()}
    info = EngineInfo("m", "float32", "f", 64, 8, (), 4, 8, 16, 16)
    for family in StateCollector(
        lambda: Snapshot(info, Status(), (), lambda digest: ()), lambda: 0.0
    ).collect():
        found[family.name] = set()
    for family in DemandCollector(lambda: Demand(executors=1)).collect():
        found[family.name] = {label for sample in family.samples for label in sample.labels}
    return found


def alerts() -> Iterator[tuple[str, str]]:
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def panels() -> Iterator[tuple[str, str]]:
    for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield f"{panel['title']}: {target['legendFormat']}", target["expr"]


def test_a_scheduler_that_is_gone_raises_an_alarm() -> None:
    """No other rule does: where there is no series, nothing is compared."""
    assert dict(alerts())["LoraFleetNoScheduler"] == "absent(lorafleet_scheduler_executors)"


@pytest.mark.parametrize(("name", "expression"), [*alerts(), *panels()])
def test_what_is_asked_for_exists(name: str, expression: str, exported: Mapping[str, set[str]]) -> None:
    asked = set(re.findall(r"lorafleet_\w+", expression))
    assert asked and asked <= exported.keys()
    labels = set().union(*(exported[metric] for metric in asked)) | OF_EVERY_SERIES
    grouped = {
        label.strip() for names in re.findall(r"by \(([^)]*)\)", expression) for label in names.split(",")
    }
    matched = set(re.findall(r"[{,](\w+)[=!]", expression))
    assert grouped | matched <= labels
    if name in dict(panels()):
        assert set(re.findall(r"\{\{(\w+)\}\}", name)) <= grouped | OF_EVERY_SERIES


def test_states_are_those_of_executors() -> None:
    states = {phase.name.lower() for phase in Phase} | {*CLOSED}
    for _, expression in alerts():
        for pattern in re.findall(r'state=~?"([^"]+)"', expression):
            assert set(pattern.split("|")) <= states


def test_every_alert_says_what_to_do() -> None:
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            assert {"summary", "action"} == rule["annotations"].keys(), rule["alert"]
            assert rule["labels"]["severity"] in ("page", "ticket")
