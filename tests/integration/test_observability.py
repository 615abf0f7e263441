"""Health, reflection and metrics of both services; nothing that clients make up becomes a series."""

import secrets
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from lorafleet import AdapterNotFound, Client, LoraFleetError
from lorafleet.v1 import inference_pb2
from tests.support.services.cluster import READINESS, Cluster, Node, Pair, wait_until
from tests.support.services.failures import bearer, raw_stubs
from tests.support.services.proxy import Proxy
from tests.support.services.streams import watch
from tests.support.stores.redis_server import RedisServer


@pytest.fixture
def client(main: Pair) -> Iterator[Client]:
    with main.client("ops") as client:
        yield client


def services(node: Node, token: str | None = None) -> dict[str, list[str]]:
    """Methods by service, as reflection tells them."""
    metadata = bearer(token)
    ask = reflection_pb2.ServerReflectionRequest
    with grpc.insecure_channel(node.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (listed,) = stub.ServerReflectionInfo(iter([ask(list_services="")]), metadata=metadata)
        names = [service.name for service in listed.list_services_response.service]
        asked = (ask(file_containing_symbol=name) for name in names)
        answers = list(stub.ServerReflectionInfo(asked, metadata=metadata))
    found: dict[str, list[str]] = {}
    for answer in answers:
        for data in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            for service in file.service:
                found[f"{file.package}.{service.name}"] = [method.name for method in service.method]
    assert set(names) <= set(found)
    return found


def test_health_and_reflection(main: Pair) -> None:
    for node, name in ((main.scheduler, "lorafleet.v1.Inference"), (main.executor, "lorafleet.v1.Executor")):
        assert node.health() == node.health(name) == "SERVING"
        assert node.health("lorafleet.v1.Nothing") == "NOT_FOUND"
    scheduler, executor = services(main.scheduler, "ops"), services(main.executor)
    assert scheduler["lorafleet.v1.Inference"] == ["Generate", "GenerateStream", "Tokenize", "ListModels"]
    assert {"Push", "Pull", "List", "SetAlias"} <= set(scheduler["lorafleet.v1.Adapters"])
    assert scheduler["lorafleet.v1.Fleet"] == ["Watch", "Cordon", "Drain"]
    assert executor["lorafleet.v1.Executor"] == ["Describe", "Execute"]


def test_probes_are_answered_behind_a_deep_queue(one: Pair) -> None:
    """Probes do not wait behind requests, and a full queue is no reason to be restarted."""
    with one.client() as client:
        streams = [watch(client, [7, 8, 9], 4000) for _ in range(40)]
        wait_until(lambda: one.scheduler.gauge("queue_requests") >= 30, "many wait")
        for node, name in (
            (one.scheduler, "lorafleet.v1.Inference"),
            (one.executor, "lorafleet.v1.Executor"),
        ):
            assert node.health() == node.health(name) == "SERVING"
    for stream in streams:
        stream.wait_end()
    one.wait_idle()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Closed, it holds back all that the store says to `far`. It opens at the end, whatever happens."""
    gate = threading.Event()
    gate.set()
    yield gate
    gate.set()


@pytest.fixture
def far(cluster: Cluster, tmp_path: Path, gate: threading.Event) -> Iterator[Pair]:
    """A scheduler beside its store, and an executor far away from it."""

    def hold(size: int) -> float:
        gate.wait()
        return 0.0

    with (
        RedisServer(tmp_path / "redis") as redis,
        Proxy(redis.port, hold) as proxy,
        Cluster(cluster.model, tmp_path, store_url=redis.url) as apart,
    ):
        store = ("--store", f"redis://127.0.0.1:{proxy.port}?timeout=60")
        yield apart.pair("far", (*store, "--max-loras", "1", "--max-seats", "8"))
        gate.set()  # before they are told to end


def test_probes_are_answered_while_a_load_hangs_and_500_requests_wait_for_it(
    far: Pair, gate: threading.Event, adapter: Callable[..., Path]
) -> None:
    """No load and no queue makes a pod look dead or unready, and what runs beside them goes on."""
    request = inference_pb2.GenerateRequest(text="a", adapter="cold")
    request.stopping.max_new_tokens = 1
    with raw_stubs(far.scheduler.address) as stubs:
        with far.client() as client:
            client.adapters.push(adapter("cold"), "cold")
            stream = watch(client, [7, 8, 9], 4000)
            stream.wait_for(1)
            gate.clear()
            answers = [stubs.inference.Generate.future(request) for _ in range(500)]
            wait_until(lambda: far.scheduler.gauge("queue_requests") >= 490, "all but a few wait")
            wait_until(lambda: far.executor.gauge("loads_in_flight"), "the load begins")
            for node in (far.scheduler, far.executor):
                assert node.health() == node.health(READINESS[node.module]) == "SERVING"
            stream.wait_for(len(stream.tokens) + 1)
            assert far.executor.gauge("loads_in_flight") and not any(answer.done() for answer in answers)
        gate.set()
        assert all(answer.result().token_ids for answer in answers)


def series(node: Node) -> dict[str, set[str]]:
    """Label sets by metric, of a text that must parse."""
    with urllib.request.urlopen(node.metrics_url) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        families = list(text_string_to_metric_families(response.read().decode()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    assert all(family.documentation for family in families if family.name.startswith("lorafleet_"))
    return {f.name: {f"{s.name}{sorted(s.labels.items())}" for s in f.samples} for f in families}


def test_names_that_clients_make_up_are_no_series(main: Pair, client: Client) -> None:
    """Quotes, newlines and 10,000 letters neither break the metrics' text nor make it grow."""
    client.generate("a", max_new_tokens=1)
    odd = ['"quoted"', "new\nline", "back\\slash", "x" * 10_000, "naïve", "a{b=c}"]
    made_up = [*odd, *(f"junk-{secrets.token_hex(8)}" for _ in range(500))]
    with pytest.raises(AdapterNotFound):
        client.generate("a", adapter="junk")
    with pytest.raises(LoraFleetError):
        client.generate("a", adapter='"quoted"')
    before = [series(main.scheduler), series(main.executor)]
    for name in made_up:
        with pytest.raises(LoraFleetError):
            client.generate("a", adapter=name)
    for name in made_up[:100]:
        client.generate("a", max_new_tokens=1, request_id=name[:60].replace("\n", ""), session_id=name[6:40])
    assert [series(main.scheduler), series(main.executor)] == before


def test_residency_does_not_depend_on_traffic(
    main: Pair, client: Client, adapter: Callable[..., Path]
) -> None:
    """Loaded and idle is still loaded; what left its slot is still in host memory."""

    def copies() -> set[str]:
        prefix = f"lorafleet_executor_adapter_resident{{digest={digest},tier="
        return {key.removeprefix(prefix)[:-1] for key in main.executor.metrics() if key.startswith(prefix)}

    def sequences(state: str) -> float:
        name = f"lorafleet_executor_adapter_sequences{{digest={digest},state={state}}}"
        return main.executor.metrics().get(name, 0)

    digest = client.adapters.push(adapter("resident"), "resident").version.digest
    assert copies() == set()
    client.generate("a", adapter="resident", max_new_tokens=1)
    main.wait_idle()
    assert copies() == {"host", "slot"} and sequences("running") == 0
    with main.client("ops") as other:
        streams = [watch(other, [5, 6], 3000, adapter="resident") for _ in range(3)]
        wait_until(lambda: sequences("running") == 3, "three run")
        wait_until(lambda: main.scheduler.gauge("seats_in_use") == 3, "the scheduler sees that")
        assert main.scheduler.metrics()["lorafleet_scheduler_wanted_executors{part=running}"] > 0
    for stream in streams:
        stream.wait_end()
    for number in range(4):  # those that are used more take all slots
        name = f"filler-{number}"
        client.adapters.push(adapter(name), name)
        for _ in range(6):
            client.generate("a", adapter=name, max_new_tokens=1)
    main.wait_idle()
    assert copies() == {"host"}
    residency: Any = client.adapters.residency("resident")
    assert {copy.tier.lower() for copy in residency} == {"host"}
