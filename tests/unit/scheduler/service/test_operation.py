"""What those who run a scheduler see of it and do to it, over real sockets."""

import asyncio
import hashlib
import itertools
import re
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from lorafleet.v1 import (
    executor_pb2,
    fleet_pb2,
)
from scheduler import fleet_service
from scheduler.app import CannotListen, Scheduler
from scheduler.dispatch.queue import Queue
from scheduler.fleet.fleet import Fleet
from tests.support.services.scheduler_house import House, fails, generate, open_house, read
from tests.support.services.scheduling import until

INFERENCE = "lorafleet.v1.Inference"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_health_follows_the_executors(house: House) -> None:
    await becomes(house, SERVING)
    house.fake.load_state = executor_pb2.LOAD_STATE_DRAINING
    await becomes(house, NOT_SERVING)
    assert await house.health("") == SERVING
    house.fake.load_state = executor_pb2.LOAD_STATE_READY
    await becomes(house, SERVING)


async def becomes(house: House, status: int) -> None:
    async with asyncio.timeout(60):
        while await house.health(INFERENCE) != status:
            await asyncio.sleep(0.02)


async def test_reflection_lists_the_services(house: House) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(house.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    [answer] = [a async for a in stub.ServerReflectionInfo(iter([request]))]
    names = {service.name for service in answer.list_services_response.service}
    assert {INFERENCE, "lorafleet.v1.Adapters", "lorafleet.v1.Fleet", "grpc.health.v1.Health"} <= names


async def test_draining_refuses_new_and_ends_old(house: House) -> None:
    """A rollout cuts no stream."""
    house.fake.step_s = 0.02
    stream = house.inference.GenerateStream(generate(max_new_tokens=30))
    reading = asyncio.create_task(read(stream))
    await until(lambda: house.scheduler.dispatcher.num_live == 1)
    drained = asyncio.create_task(house.scheduler.drain())
    await until(lambda: house.scheduler.dispatcher.draining)
    code, reason, _ = await fails(house.inference.Generate(generate()))
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert await house.health(INFERENCE) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert (await reading)[-1].usage.completion_tokens == 30
    assert await drained


async def test_watch_cordon_and_drain_an_executor(house: House) -> None:
    watch = house.fleet.Watch(fleet_pb2.WatchFleetRequest(interval_ms=10))
    snapshot = await watch.read()
    assert [(e.address, e.state, e.max_loras) for e in snapshot.executors] == [
        (house.fake.address, fleet_pb2.EXECUTOR_STATE_READY, 4)
    ]
    house.fake.step_s = 0.01
    running = asyncio.ensure_future(house.inference.Generate(generate(max_new_tokens=30)))
    await until(lambda: bool(house.fake.running))
    drained = await house.fleet.Drain(fleet_pb2.DrainExecutorRequest(address=house.fake.address))
    assert (drained.executor.cordoned, drained.executor.running) == (True, 0)
    assert (await running).usage.completion_tokens == 30
    waiting = asyncio.ensure_future(house.inference.Generate(generate()))
    await until(lambda: len(house.scheduler.dispatcher.queue) == 1)
    while not (await watch.read()).waiting:
        pass
    await house.fleet.Cordon(fleet_pb2.CordonRequest(address=house.fake.address, cordoned=False))
    assert (await waiting).usage.completion_tokens == 12
    code, _, message = await fails(house.fleet.Cordon(fleet_pb2.CordonRequest(address="nowhere:1")))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert house.fake.address in message
    watch.cancel()


async def test_watchers_are_counted_and_share_one_picture_ten_times_a_second(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def look(fleet: Fleet, queue: Queue) -> fleet_pb2.FleetSnapshot:
        looks.append(asyncio.get_running_loop().time())
        return fleet_pb2.FleetSnapshot(waiting=len(looks))

    monkeypatch.setattr(fleet_service, "snapshot", look)
    request = fleet_pb2.WatchFleetRequest(interval_ms=1)
    watches = [house.fleet.Watch(request) for _ in range(fleet_service.MAX_TENANT_WATCHES)]
    seen = [[(await watch.read()).waiting for _ in range(4)] for watch in watches]
    assert all(numbers == sorted(set(numbers)) for numbers in seen)
    assert min(after - before for before, after in itertools.pairwise(looks)) >= 0.1
    code, reason, _ = await fails(house.fleet.Watch(request))
    assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHES")
    watches.pop().cancel()
    async with asyncio.timeout(60):
        while not (again := await taken(house.fleet.Watch(request))):
            await asyncio.sleep(0.01)
    for watch in (*watches, again):
        watch.cancel()


async def taken(watch: Any) -> Any:
    """The call, if it is not refused."""
    try:
        await watch.read()
    except grpc.aio.AioRpcError:
        return None
    return watch


async def test_a_fleet_that_is_cordoned_is_not_ready_and_keeps_nobody_waiting(model: Path) -> None:
    async with open_house(model, queue_timeout=0.3, metrics_port=0) as house:
        cordon = fleet_pb2.CordonRequest(address=house.fake.address, cordoned=True)
        await house.fleet.Cordon(cordon)
        waited = await fails(house.inference.Generate(generate()))
        assert waited[:2] == (grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR")
        assert waited[2].endswith("1 of 1 are cordoned")
        await becomes(house, NOT_SERVING)
        assert await executors(house) == {"cordoned": 1}
        cordon.cordoned = False
        await house.fleet.Cordon(cordon)
        await becomes(house, SERVING)
        assert await executors(house) == {"ready": 1}
        assert (await house.inference.Generate(generate())).usage.completion_tokens == 12


async def executors(house: House) -> dict[str, int]:
    """How many there are by state, by the metrics."""
    url = f"http://127.0.0.1:{house.scheduler.metrics_port}/metrics"
    page = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
    found = re.findall(r'lorafleet_scheduler_executors\{state="(\w+)"\} (\d+)', page)
    return {state: int(count) for state, count in found if int(count)}


async def test_tokens_tell_callers_apart(model: Path, tmp_path: Path, digest: str) -> None:
    tokens = tmp_path / "tokens.toml"
    hashed = hashlib.sha256(b"secret").hexdigest()
    tokens.write_text(f'[[tokens]]\nsha256 = "{hashed}"\ntenant = "acme"\nrights = ["infer"]\n')
    async with open_house(model, tokens_file=tokens) as house:
        code, _, _ = await fails(house.inference.Generate(generate()))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        bearer = (("authorization", "Bearer secret"),)
        assert (await house.inference.Generate(generate(), metadata=bearer)).usage.completion_tokens == 12
        hidden = generate(adapter="default/alice")
        code, _, _ = await fails(house.inference.Generate(hidden, metadata=bearer))
        assert code is grpc.StatusCode.NOT_FOUND
        watch = house.fleet.Watch(fleet_pb2.WatchFleetRequest(), metadata=bearer)
        code, _, _ = await fails(watch)
        assert code is grpc.StatusCode.PERMISSION_DENIED


async def test_metrics_over_http(model: Path, digest: str) -> None:
    async with open_house(model, metrics_port=0) as house:
        answer = await house.inference.Generate(generate(adapter="alice"))
        await fails(house.inference.Generate(generate(adapter="junk-name")))
        url = f"http://127.0.0.1:{house.scheduler.metrics_port}/metrics"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read().decode())
    assert 'lorafleet_scheduler_requests_total{code="OK"} 1.0' in page
    assert 'lorafleet_scheduler_requests_total{code="NOT_FOUND"} 1.0' in page
    labels = 'adapter="default/alice",kind="generated",tenant="default"'
    assert f"lorafleet_scheduler_tokens_total{{{labels}}} 12.0" in page
    assert f"lorafleet_scheduler_request_prompt_tokens_sum {answer.usage.prompt_tokens}.0" in page
    assert "lorafleet_scheduler_request_generated_tokens_sum 12.0" in page
    assert "lorafleet_scheduler_request_seconds_count 1.0" in page
    assert "junk-name" not in page and "_created" not in page


async def test_a_port_in_use_is_told(house: House) -> None:
    second = Scheduler(replace(house.scheduler.config, listen=house.scheduler.address))
    with pytest.raises(CannotListen, match=house.scheduler.address):
        await second.start()
    await second.stop()
