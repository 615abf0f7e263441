"""Autoscalers follow a metric that schedulers have, and take executors away no faster than they drain."""

import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml

from executor.config import load_config
from scheduler.fleet.demand import Demand
from scheduler.fleet.demand_series import DemandCollector
from tests.contracts.manifests import ROOT, one, pod, render

NAME = "lorafleet-executor"
RULES = ROOT / "deploy/autoscaling/hpa/adapter-rules.yaml"

# Objects of which kubernetes_validate has no schema: the fields that each level may have, as far as we use
# them. A level is named by its path; `[]` stands for the items of a list.
FIELDS = {
    # kedacore/keda: config/crd/bases/keda.sh_scaledobjects.yaml; ScaleTriggers, with metricType, in
    # apis/keda/v1alpha1/scaletriggers_types.go.
    "ScaledObject.spec": {
        "scaleTargetRef",
        "pollingInterval",
        "cooldownPeriod",
        "minReplicaCount",
        "maxReplicaCount",
        "advanced",
        "triggers",
    },
    "ScaledObject.spec.scaleTargetRef": {"apiVersion", "kind", "name"},
    "ScaledObject.spec.advanced": {"horizontalPodAutoscalerConfig", "restoreToOriginalReplicaCount"},
    # Its `behavior` is that of autoscaling/v2, which the test validates as such.
    "ScaledObject.spec.advanced.horizontalPodAutoscalerConfig": {"behavior", "name"},
    "ScaledObject.spec.triggers[]": {"type", "name", "metricType", "metadata", "authenticationRef"},
    # keda.sh/docs/scalers/prometheus, "Trigger Specification".
    "ScaledObject.spec.triggers[].metadata": {
        "serverAddress",
        "query",
        "threshold",
        "activationThreshold",
        "namespace",
        "ignoreNullValues",
    },
    # kubernetes-sigs/prometheus-adapter: pkg/config/config.go.
    "adapter": {"rules", "resourceRules", "externalRules"},
    "adapter.externalRules[]": {"seriesQuery", "seriesFilters", "resources", "name", "metricsQuery"},
    "adapter.externalRules[].resources": {"template", "overrides", "namespaced"},
    "adapter.externalRules[].resources.overrides.namespace": {"group", "resource"},
    "adapter.externalRules[].name": {"matches", "as"},
}


def levels(value: Any, path: str) -> Iterator[tuple[str, set[str]]]:
    """The keys of each object in a value, by its path."""
    if isinstance(value, dict):
        yield path, set(value)
        for key, inner in value.items():
            yield from levels(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from levels(inner, f"{path}[]")


@pytest.fixture(scope="module")
def hpa() -> dict[str, Any]:
    return one(render("autoscaling/hpa"), "HorizontalPodAutoscaler", NAME)


@pytest.fixture(scope="module")
def scaled() -> dict[str, Any]:
    return one(render("autoscaling/keda"), "ScaledObject", NAME)


@pytest.fixture(scope="module")
def rule() -> dict[str, Any]:
    (rule,) = yaml.safe_load(RULES.read_text())["externalRules"]
    return dict(rule)


def query(text: str) -> str:
    return " ".join(text.split())


def test_the_autoscaler_is_valid(hpa: dict[str, Any]) -> None:
    kubernetes_validate.validate(hpa, "1.34", strict=True)


def test_objects_without_a_schema_have_fields_that_their_makers_name(scaled: dict[str, Any]) -> None:
    behavior = "ScaledObject.spec.advanced.horizontalPodAutoscalerConfig.behavior"
    found = [
        *levels(scaled["spec"], "ScaledObject.spec"),
        *levels(yaml.safe_load(RULES.read_text()), "adapter"),
    ]
    for path, keys in found:
        if path == "adapter.externalRules[].resources.overrides":
            continue  # Labels of Prometheus.
        assert path.startswith(behavior) or keys <= FIELDS[path], path
    (trigger,) = scaled["spec"]["triggers"]
    assert all(isinstance(value, str) for value in trigger["metadata"].values())


def test_both_autoscalers_do_the_same_to_the_same(hpa: dict[str, Any], scaled: dict[str, Any]) -> None:
    ours, theirs = hpa["spec"], scaled["spec"]
    assert ours["scaleTargetRef"] == theirs["scaleTargetRef"]
    assert ours["behavior"] == theirs["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert (ours["minReplicas"], ours["maxReplicas"]) == (
        theirs["minReplicaCount"],
        theirs["maxReplicaCount"],
    )
    target = one(render("base"), ours["scaleTargetRef"]["kind"], ours["scaleTargetRef"]["name"])
    assert target["apiVersion"] == ours["scaleTargetRef"]["apiVersion"]


@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_applying_a_fleet_again_leaves_its_size_to_the_autoscaler(overlay: str) -> None:
    assert "replicas" not in one(render(overlay), "StatefulSet", NAME)["spec"]


def test_all_ask_for_the_same_number(
    hpa: dict[str, Any], scaled: dict[str, Any], rule: dict[str, Any]
) -> None:
    """The autoscaler's rule, KEDA's query and the alert, each of parts that schedulers export."""
    (metric,) = hpa["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    (trigger,) = scaled["spec"]["triggers"]
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    (series,) = re.findall(r"^\^(\w+)\$$", rule["name"]["matches"])
    assert rule["seriesQuery"].startswith(series + "{")
    asked = rule["metricsQuery"].replace("<<.Series>>", series).replace(",<<.LabelMatchers>>", "")
    assert query(asked) == query(trigger["metadata"]["query"])
    alerts = yaml.safe_load((ROOT / "deploy/monitoring/alerts.yaml").read_text())["groups"][0]["rules"]
    (alert,) = (each for each in alerts if each.get("alert") == "LoraFleetFleetIsTooSmall")
    assert query(alert["expr"]).startswith(query(asked) + " > ")
    readme = (ROOT / "deploy/autoscaling/README.md").read_text()
    assert query(asked) in query(readme)
    exported = {
        (sample.name, sample.labels.get("part"))
        for family in DemandCollector(lambda: Demand(executors=1)).collect()
        for sample in family.samples
    }
    assert {(series, part) for part in re.findall(r'part="(\w+)"', asked)} <= exported


@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_one_executor_has_drained_before_the_next_one_goes(overlay: str, hpa: dict[str, Any]) -> None:
    objects = render(overlay)
    spec, container = pod(one(objects, "StatefulSet", NAME))
    grace = spec["terminationGracePeriodSeconds"]
    assert grace > load_config(container["args"], {}).drain_timeout
    (policy,) = hpa["spec"]["behavior"]["scaleDown"]["policies"]
    assert policy == {"type": "Pods", "value": 1, "periodSeconds": policy["periodSeconds"]}
    assert policy["periodSeconds"] > grace
    # A budget by number kept would forbid, or allow too much, as the fleet's size changes.
    budget = one(objects, "PodDisruptionBudget", NAME)["spec"]
    assert budget["maxUnavailable"] == 1 and "minAvailable" not in budget
