"""The manifests render, are valid Kubernetes, and say what the services understand."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from executor.config import load_config as load_executor
from lorafleet.cli import parser
from scheduler.admission.auth import Authenticator
from scheduler.config import load_config as load_scheduler
from scheduler.fleet.discovery.dns_source import SERVICE
from scheduler.fleet.discovery.flags import DnsName, parse
from tests.contracts.manifests import ROOT, one, pod, render

PRE_STOP_SECONDS = 5


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    return render("base")


@pytest.fixture(scope="module")
def scheduler(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return one(objects, "Deployment", "lorafleet-scheduler")


@pytest.fixture(scope="module")
def executor(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return one(objects, "StatefulSet", "lorafleet-executor")


@dataclass(frozen=True)
class Certificate:
    """What cert-manager writes into a Secret."""

    secret: str
    usages: tuple[str, ...]
    names: tuple[str, ...]
    issuer: str

    def is_for(self, usage: str, name: str) -> bool:
        """A star stands for what comes before the first dot."""
        return usage in self.usages and bool({name, "*." + name.partition(".")[2]} & set(self.names))


Certificates = dict[str, Certificate]


@pytest.fixture(scope="module")
def certificates() -> Certificates:
    """By Secret. All issuers are there, and none signs with another's key."""
    objects = render("certificates")
    issuers = {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "Issuer"}
    specs = [o["spec"] for o in objects if o["kind"] == "Certificate"]
    assert {spec["issuerRef"]["name"] for spec in specs} == set(issuers)
    signing = {spec["ca"]["secretName"] for spec in issuers.values() if "ca" in spec}
    assert signing == {spec["secretName"] for spec in specs if spec.get("isCA")} and len(signing) == 2
    return {
        spec["secretName"]: Certificate(
            spec["secretName"], tuple(spec["usages"]), tuple(spec["dnsNames"]), spec["issuerRef"]["name"]
        )
        for spec in specs
        if not spec.get("isCA")
    }


def test_a_renewal_that_works_raises_no_alarm() -> None:
    """Certificates are renewed days before the first alert on their end."""
    groups = yaml.safe_load((ROOT / "deploy/monitoring/alerts.yaml").read_text())["groups"]
    rules = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    (days,) = set(re.findall(r"< (\d+) \* 86400", rules["LoraFleetCertificateEndsSoon"]))
    specs = [o["spec"] for o in render("certificates") if o["kind"] == "Certificate"]
    leaves = [spec for spec in specs if not spec.get("isCA")]
    assert leaves
    for spec in leaves:
        assert int(spec["renewBefore"].removesuffix("h")) >= 24 * (int(days) + 3)


def secret_files(spec: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Path in the container -> (Secret, key). Each Secret has what cert-manager writes."""
    (container,) = spec["containers"]
    mounts = container["volumeMounts"]
    folders = {mount["name"]: mount["mountPath"] for mount in mounts if mount.get("readOnly")}
    secrets = {volume["name"]: volume["secret"] for volume in spec["volumes"] if "secret" in volume}
    return {
        f"{folders[name]}/{key}": (secret["secretName"], key)
        for name, secret in secrets.items()
        for key in [item["key"] for item in secret.get("items", ())] or ("ca.crt", "tls.crt", "tls.key")
    }


def pod_specs(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for item in objects:
        if item["kind"] == "CronJob":
            yield item["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        elif item["kind"] in ("Deployment", "StatefulSet"):
            yield item["spec"]["template"]["spec"]


@pytest.mark.parametrize("overlay", ["base", "gpu", "upkeep"])
def test_every_object_is_valid_and_pods_may_do_little(overlay: str) -> None:
    """What Pod Security's level "restricted" asks for."""
    objects = render(overlay)
    for item in objects:
        kubernetes_validate.validate(item, "1.34", strict=True)
    specs = list(pod_specs(objects))
    assert specs
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_executors_cannot_write_what_they_only_read(overlay: str) -> None:
    """The store is everybody's."""
    _, container = pod(one(render(overlay), "StatefulSet", "lorafleet-executor"))
    read_only = {mount["name"] for mount in container["volumeMounts"] if mount.get("readOnly")}
    assert read_only == {"model", "store", "tls"}


def test_what_needs_no_files_of_its_own_can_change_none(scheduler: dict[str, Any]) -> None:
    """The scheduler writes to its store and to /tmp, upkeep nowhere."""
    for spec in (scheduler["spec"]["template"]["spec"], *pod_specs(render("upkeep"))):
        (container,) = spec["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]


def test_probes_bear_a_busy_process(scheduler: dict[str, Any], executor: dict[str, Any]) -> None:
    """The default, one second, is less than a step on a CPU takes."""
    for workload in (scheduler, executor):
        _, container = pod(workload)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["timeoutSeconds"] >= 5


def test_an_executor_on_a_gpu_asks_for_one_and_for_what_it_copies_from() -> None:
    spec, container = pod(one(render("gpu"), "StatefulSet", "lorafleet-executor"))
    config = load_executor(container["args"], {})
    assert (config.device, config.listen, config.metrics_port) == ("cuda", "0.0.0.0:50061", 9401)
    assert spec["terminationGracePeriodSeconds"] > config.drain_timeout
    resources = container["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == str(config.tensor_parallel_size)
    assert resources["requests"]["memory"] == "32Gi" and config.host_memory_bytes <= 16 << 30
    image = container["image"].partition(":")[0].removeprefix("lorafleet-")
    assert (ROOT / f"deploy/{image}.Dockerfile").exists()


def test_only_schedulers_reach_executors_and_no_pod_a_health_port(
    objects: list[dict[str, Any]], scheduler: dict[str, Any], executor: dict[str, Any]
) -> None:
    (open_to_all,) = one(objects, "NetworkPolicy", "lorafleet-scheduler")["spec"]["ingress"]
    assert [port["port"] for port in open_to_all["ports"]] == ["grpc", "metrics"]
    selected = one(objects, "NetworkPolicy", "lorafleet-scheduler")["spec"]["podSelector"]["matchLabels"]
    assert selected.items() <= scheduler["spec"]["template"]["metadata"]["labels"].items()
    spec = one(objects, "NetworkPolicy", "lorafleet-executor")["spec"]
    labels = executor["spec"]["template"]["metadata"]["labels"]
    assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    grpc, metrics = spec["ingress"]
    (caller,) = grpc["from"]
    assert caller["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "lorafleet-scheduler"}
    assert [port["port"] for port in (*grpc["ports"], *metrics["ports"])] == ["grpc", "metrics"]


def test_upkeep_runs_commands_that_exist(objects: list[dict[str, Any]]) -> None:
    service = one(objects, "Service", "lorafleet-scheduler")
    for spec in pod_specs(render("upkeep")):
        (container,) = spec["containers"]
        args = parser().parse_args(container["args"])
        assert args.target == f"lorafleet-scheduler:{service['spec']['ports'][0]['port']}"
        assert secret_files(spec) == {str(args.tls_ca): ("lorafleet-scheduler-tls", "ca.crt")}


def test_prometheus_is_told_where_metrics_are(scheduler: dict[str, Any], executor: dict[str, Any]) -> None:
    for workload in (scheduler, executor):
        ports = {port["name"]: port["containerPort"] for port in pod(workload)[1]["ports"]}
        annotations = workload["spec"]["template"]["metadata"]["annotations"]
        assert annotations == {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(ports["metrics"]),
        }


def test_the_services_accept_their_flags(scheduler: dict[str, Any], executor: dict[str, Any]) -> None:
    spec, container = pod(scheduler)
    config = load_scheduler(container["args"], {})
    assert spec["terminationGracePeriodSeconds"] > PRE_STOP_SECONDS + config.drain_timeout
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(PRE_STOP_SECONDS)]
    assert_ports(container, config.listen, config.health_port, config.metrics_port)

    spec, container = pod(executor)
    executor_config = load_executor(container["args"], {})
    assert spec["terminationGracePeriodSeconds"] > executor_config.drain_timeout
    executor_ports = executor_config.health_port, executor_config.metrics_port
    assert_ports(container, executor_config.listen, *executor_ports)


def assert_ports(container: dict[str, Any], listen: str, health_port: int, metrics_port: int) -> None:
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    grpc = int(listen.rpartition(":")[2])
    assert ports == {"grpc": grpc, "health": health_port, "metrics": metrics_port}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["grpc"]["port"] == health_port, "the kubelet's probes know no TLS"


@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_every_connection_has_certificates_on_both_ends(overlay: str, certificates: Certificates) -> None:
    """The names in them are those that are dialled, and what opens executors is no server's."""
    objects = render(overlay)
    spec, container = pod(one(objects, "Deployment", "lorafleet-scheduler"))
    config, files = load_scheduler(container["args"], {}), secret_files(spec)
    served = certificates[files[str(config.tls_cert_file)][0]]
    assert files[str(config.tls_key_file)] == (served.secret, "tls.key")
    assert served.is_for("server auth", "lorafleet-scheduler") and not config.insecure
    ours = certificates[files[str(config.executor_cert_file)][0]]
    assert files[str(config.executor_key_file)] == (ours.secret, "tls.key")
    assert files[str(config.executor_ca_file)] == (ours.secret, "ca.crt")

    spec, container = pod(one(objects, "StatefulSet", "lorafleet-executor"))
    executor_config, files = load_executor(container["args"], {}), secret_files(spec)
    theirs = certificates[files[str(executor_config.tls_cert_file)][0]]
    assert files[str(executor_config.tls_key_file)] == (theirs.secret, "tls.key")
    assert files[str(executor_config.tls_client_ca_file)] == (theirs.secret, "ca.crt")
    assert not executor_config.insecure
    for flag in config.executor:
        place = parse(flag)
        assert isinstance(place, DnsName) and theirs.is_for("server auth", f"any-pod.{place.name}")
    assert ours.is_for("client auth", "lorafleet-scheduler") and "server auth" not in ours.usages
    assert "client auth" not in theirs.usages
    assert ours.issuer == theirs.issuer != served.issuer, "a client's certificate would open executors"


@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_keys_and_tokens_are_not_for_everybody(overlay: str) -> None:
    for spec in pod_specs(render(overlay)):
        secrets = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
        assert secrets and all(secret["defaultMode"] == 0o440 for secret in secrets)


def test_probes_name_real_health_services(scheduler: dict[str, Any], executor: dict[str, Any]) -> None:
    for workload, service in ((scheduler, "lorafleet.v1.Inference"), (executor, "lorafleet.v1.Executor")):
        _, container = pod(workload)
        assert container["readinessProbe"]["grpc"]["service"] == service
        # Liveness asks for "": a pod that loads or drains must not be restarted.
        assert "service" not in container["livenessProbe"]["grpc"]


def test_the_scheduler_asks_for_executors_where_their_service_tells_of_them(
    objects: list[dict[str, Any]], scheduler: dict[str, Any], executor: dict[str, Any]
) -> None:
    """By names of their own, for which the port must be called as the SRV records are asked for."""
    _, container = pod(scheduler)
    (flag,) = load_scheduler(container["args"], {}).executor
    place = parse(flag)
    assert isinstance(place, DnsName) and place.name == executor["spec"]["serviceName"]
    service = one(objects, "Service", place.name)["spec"]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
    selected = service["selector"].items()
    assert selected <= executor["spec"]["template"]["metadata"]["labels"].items()
    (port,) = service["ports"]
    assert (f"_{port['name']}._tcp", port["port"]) == (SERVICE, place.port)


def test_selectors_find_their_pods(objects: list[dict[str, Any]]) -> None:
    labels = [
        o["spec"]["template"]["metadata"]["labels"]
        for o in objects
        if o["kind"] in ("Deployment", "StatefulSet")
    ]
    for item in (o for o in objects if o["kind"] in ("Service", "PodDisruptionBudget")):
        selector = item["spec"]["selector"]
        wanted = selector.get("matchLabels", selector)
        assert len([found for found in labels if wanted.items() <= found.items()]) == 1, item["metadata"][
            "name"
        ]


@pytest.mark.parametrize(
    ("image", "module", "extra"),
    [
        ("scheduler", "scheduler", "scheduler"),
        ("executor", "executor", "executor"),
        ("executor-gpu", "executor", "gpu"),
    ],
)
def test_dockerfiles_copy_what_exists_and_start_the_service(image: str, module: str, extra: str) -> None:
    lines = (ROOT / f"deploy/{image}.Dockerfile").read_text().splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for source in (name for names in copies for name in names):
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, f"{source} does not reach the build"
    assert lines[-1] == f'ENTRYPOINT ["/opt/lorafleet/bin/python", "-m", "{module}"]'
    assert any(f"'.[{extra},redis]'" in line for line in lines)


def test_the_tokens_of_the_readme_are_understood(tmp_path: Path) -> None:
    text = (ROOT / "deploy/README.md").read_text()
    example = text[text.index("[[tokens]]") : text.index("kubectl create secret")]
    digest = hashlib.sha256(b"secret").hexdigest()
    file = tmp_path / "tokens.toml"
    file.write_text(example.replace("<64 hex digits>", digest))
    identity = Authenticator(file).identify((("authorization", "Bearer secret"),))
    assert (identity.tenant, identity.adapters) == ("acme", ("acme/*",))
