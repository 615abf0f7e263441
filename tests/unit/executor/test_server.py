"""The executor over a real socket, with a real engine on its thread."""

import asyncio
import contextlib
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from adapter_store import DiskStore
from executor.app import ExecutorApp
from executor.config import ExecutorConfig
from executor.engine import Engine
from executor.errors import StartError
from executor.server import SERVICE
from lorafleet.v1 import adapters_pb2, executor_pb2, executor_pb2_grpc
from tests.support.engines import SMALL

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Scheduler:
    """One Execute stream, seen from the other end."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stub = executor_pb2_grpc.ExecutorStub(channel)  # type: ignore[no-untyped-call]
        self.call = stub.Execute()
        self.events: list[executor_pb2.ExecutorEvent] = []
        self.tokens: dict[str, list[int]] = {}
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while (event := await self.call.read()) is not grpc.aio.EOF:
            self.events.append(event)
            step, start = event.step, 0
            for name, first, count in zip(
                step.dispatch_ids, step.first_output_index, step.token_counts, strict=True
            ):
                tokens = self.tokens.setdefault(name, [])
                assert first == len(tokens)
                tokens += step.token_ids[start : start + count]
                start += count

    async def send(self, **command: Any) -> None:
        await self.call.write(executor_pb2.ExecutorCommand(**command))

    async def dispatch(self, *dispatches: executor_pb2.Dispatch) -> None:
        await self.send(dispatch=executor_pb2.DispatchBatch(dispatches=dispatches))

    def of(self, kind: str) -> list[Any]:
        return [getattr(event, kind) for event in self.events if event.WhichOneof("event") == kind]

    async def until(self, done: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not done():
                await asyncio.sleep(0.005)

    async def ended(self, *names: str) -> None:
        await self.until(
            lambda: {e.dispatch_id for e in [*self.of("finished"), *self.of("rejected")]} >= set(names)
        )


def dispatch(name: str, *, tokens: int = 8, digest: str = "", **fields: Any) -> executor_pb2.Dispatch:
    message = executor_pb2.Dispatch(
        dispatch_id=name, request_id=f"r-{name}", digest=digest, prompt_token_ids=range(3, 20), **fields
    )
    message.stopping.max_new_tokens = tokens
    message.stopping.ignore_eos = True
    return message


@contextlib.asynccontextmanager
async def running(base: Path, store: DiskStore, **settings: Any) -> AsyncIterator[ExecutorApp]:
    settings = SMALL | {"listen": "127.0.0.1:0", "metrics_port": 0} | settings
    async with ExecutorApp(ExecutorConfig(model=str(base), **settings), store) as app:
        await asyncio.wait_for(app.ready.wait(), 60)
        yield app


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(tiny_base: Path, tiny_store: DiskStore) -> AsyncIterator[ExecutorApp]:
    async with running(tiny_base, tiny_store) as app:
        yield app


@contextlib.asynccontextmanager
async def connected(app: ExecutorApp) -> AsyncIterator[Scheduler]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel:
        scheduler = Scheduler(channel)
        try:
            await scheduler.until(lambda: scheduler.of("load"))
            yield scheduler
        finally:
            scheduler.call.cancel()
            scheduler.reader.cancel()


async def idle(app: ExecutorApp) -> None:
    """Everything is free, as the engine itself says."""
    async with asyncio.timeout(20):
        while True:
            snapshot = app.hub.snapshot()
            assert snapshot is not None
            status = snapshot.status
            if (status.free_seats, status.free_kv_blocks, status.free_slots) == (16, 64, 2):
                return
            await asyncio.sleep(0.005)


async def test_hello_comes_first_and_describe_says_the_same(app: ExecutorApp) -> None:
    async with connected(app) as scheduler:
        hello = scheduler.events[0].hello
        assert (hello.protocol_version, hello.max_seats, hello.max_loras, hello.block_size) == (1, 16, 2, 8)
        assert hello.modules and hello.model_fingerprint and hello.max_model_len == 512
        assert scheduler.of("load")[0].free_seats == 16
        async with grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel:
            stub = executor_pb2_grpc.ExecutorStub(channel)  # type: ignore[no-untyped-call]
            described = await stub.Describe(executor_pb2.DescribeRequest())
        assert described.instance_id == hello.instance_id


async def test_tokens_of_a_step_come_in_one_message_and_ends_follow(
    app: ExecutorApp, digests: list[str]
) -> None:
    async with connected(app) as scheduler:
        await scheduler.dispatch(
            dispatch("base", logprobs=2, prompt_logprobs=1), dispatch("a", digest=digests[0]), dispatch("b")
        )
        await scheduler.ended("base", "a", "b")
        assert {name: len(tokens) for name, tokens in scheduler.tokens.items()} == dict.fromkeys(
            ["base", "a", "b"], 8
        )
        assert scheduler.tokens["base"] == scheduler.tokens["b"] != scheduler.tokens["a"]
        steps = scheduler.of("step")
        assert len({step.step for step in steps}) == len(steps)
        first = next(step for step in steps if "base" in step.dispatch_ids)
        logprobs = next(entry for entry in first.logprobs if entry.dispatch_id == "base")
        assert len(logprobs.prompt_positions) == 17 and not logprobs.prompt_positions[0].HasField("chosen")
        assert len(logprobs.positions) == 1 and len(logprobs.positions[0].top) == 2
        assert logprobs.positions[0].top[0].token_id == scheduler.tokens["base"][0]
        loads = scheduler.of("load")
        assert {load.free_seats for load in loads if load.received_dispatches == 3} >= {13, 16}
        deltas = scheduler.of("residency")
        start = scheduler.events[0].hello.residency_number
        assert [delta.number for delta in deltas] == list(range(start + 1, start + 1 + len(deltas)))
        copies = {(entry.digest, entry.tier) for delta in deltas for entry in delta.added}
        assert (digests[0], adapters_pb2.RESIDENCY_TIER_SLOT) in copies
    await idle(app)


async def test_two_schedulers_may_use_the_same_dispatch_id(app: ExecutorApp, digests: list[str]) -> None:
    async with connected(app) as one, connected(app) as two:
        await one.dispatch(dispatch("x", digest=digests[0]))
        await two.dispatch(dispatch("x", tokens=3))
        await one.ended("x")
        await two.ended("x")
        assert (len(one.tokens["x"]), len(two.tokens["x"])) == (8, 3)


async def test_cancel_stops_the_tokens_and_frees_all(app: ExecutorApp, digests: list[str]) -> None:
    async with connected(app) as scheduler:
        await scheduler.dispatch(dispatch("x", tokens=450, digest=digests[1]))
        await scheduler.until(lambda: len(scheduler.tokens.get("x", [])) >= 3)
        await scheduler.send(cancel=executor_pb2.Cancel(dispatch_ids=["x", "unknown"]))
        await idle(app)
        assert len(scheduler.tokens["x"]) < 450
        assert not scheduler.of("finished") and not scheduler.of("rejected")


@pytest.mark.parametrize("how", ["cancel", "half-close"])
async def test_a_scheduler_that_goes_away_frees_all_within_two_steps(
    app: ExecutorApp, digests: list[str], how: str
) -> None:
    steps: list[int] = []
    take = app.hub.take

    async with connected(app) as scheduler:
        await scheduler.dispatch(dispatch("x", tokens=480, digest=digests[1]), dispatch("y", tokens=480))
        await scheduler.until(lambda: len(scheduler.tokens.get("x", [])) >= 3)
        app.hub.take = lambda events: (steps.append(events.status.running), take(events))  # type: ignore
        try:
            if how == "cancel":
                scheduler.call.cancel()
            else:
                await scheduler.call.done_writing()
            async with asyncio.timeout(20):
                while app.hub.streams:
                    await asyncio.sleep(0)
            gone = len(steps)
            await idle(app)
        finally:
            app.hub.take = take  # type: ignore[method-assign]
    assert [running for running in steps[gone:] if running][2:] == []


async def test_rejections_carry_reason_code_and_whether_to_retry(app: ExecutorApp) -> None:
    async with connected(app) as scheduler:
        await scheduler.dispatch(
            dispatch("unknown", digest=f"sha256:{'0' * 64}"),
            executor_pb2.Dispatch(dispatch_id="empty"),
            dispatch("wrong", sampling={"temperature": -1.0}),
            *(dispatch(f"{n}") for n in range(15)),
        )
        await scheduler.ended("unknown", "empty", "wrong", *(f"{n}" for n in range(15)))
        rejected = {r.dispatch_id: (r.reason, r.code, r.retryable) for r in scheduler.of("rejected")}
        assert rejected == {
            "unknown": ("ADAPTER_NOT_FOUND", grpc.StatusCode.NOT_FOUND.value[0], False),
            "empty": ("INVALID_REQUEST", grpc.StatusCode.INVALID_ARGUMENT.value[0], False),
            "wrong": ("INVALID_REQUEST", grpc.StatusCode.INVALID_ARGUMENT.value[0], False),
        }


async def test_more_dispatches_than_seats_are_handed_back(app: ExecutorApp) -> None:
    async with connected(app) as scheduler:
        names = [f"{n}" for n in range(20)]
        await scheduler.dispatch(*(dispatch(name) for name in names))
        await scheduler.ended(*names)
        rejected = {r.dispatch_id: (r.reason, r.retryable) for r in scheduler.of("rejected")}
        assert rejected == dict.fromkeys(["16", "17", "18", "19"], ("NO_SEATS", True))


async def test_reports_count_the_slots_of_all_that_they_say_was_received(
    app: ExecutorApp, digests: list[str]
) -> None:
    async with connected(app) as scheduler:
        names = ["a", "b", "c"]
        await scheduler.dispatch(
            *(dispatch(name, digest=digests[n % 2], tokens=30) for n, name in enumerate(names))
        )
        await scheduler.ended(*names)
        covering = [load for load in scheduler.of("load") if load.received_dispatches == 3]
        assert {load.free_slots for load in covering if load.free_seats == 16 - 3} == {0}


async def test_a_dispatch_id_in_use_is_refused_and_the_first_goes_on(app: ExecutorApp) -> None:
    async with connected(app) as scheduler:
        await scheduler.dispatch(dispatch("x", tokens=60), dispatch("x"))
        await scheduler.until(lambda: scheduler.of("finished"))
        assert len(scheduler.of("rejected")) == 1
        assert len(scheduler.tokens["x"]) == 60


async def test_health_reflection_and_metrics(app: ExecutorApp, digests: list[str]) -> None:
    async with connected(app) as scheduler, grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=1)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await scheduler.dispatch(dispatch("m", digest=digests[0]))
        await scheduler.ended("m")
        page = await asyncio.to_thread(scrape, app.metrics_port)
        resident = f'lorafleet_executor_adapter_resident{{digest="{digests[0]}",tier="slot"}} 1.0'
        assert resident in page
        assert 'max_lora="2"' in page and "vllm:num_requests_running" in page
        await scheduler.send(drop=executor_pb2.DropAdapter(digest=digests[0]))
        await scheduler.until(lambda: any(delta.removed for delta in scheduler.of("residency")[-1:]))
        assert digests[0] not in await asyncio.to_thread(scrape, app.metrics_port)
    services = await asyncio.to_thread(reflected, app.port)
    assert SERVICE in services


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        return str(page.read().decode())


def reflected(port: int) -> list[str]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return list(ProtoReflectionDescriptorDatabase(channel).get_services())


async def test_drain_finishes_accepted_work_and_refuses_new(tiny_base: Path, tiny_store: DiskStore) -> None:
    async with running(tiny_base, tiny_store) as app, connected(app) as scheduler:
        await scheduler.dispatch(dispatch("old", tokens=200))
        await scheduler.until(lambda: scheduler.tokens.get("old"))
        app.drain()
        await scheduler.dispatch(dispatch("new"))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE))
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=""))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await asyncio.wait_for(app.wait(), 60)
        await scheduler.reader
        assert len(scheduler.tokens["old"]) == 200 and scheduler.of("finished")
        assert [(r.dispatch_id, r.reason, r.retryable) for r in scheduler.of("rejected")] == [
            ("new", "DRAINING", True)
        ]


async def test_what_a_drain_cannot_wait_for_is_handed_back(tiny_base: Path, tiny_store: DiskStore) -> None:
    async with running(tiny_base, tiny_store, drain_timeout=0.2) as app, connected(app) as scheduler:
        await scheduler.dispatch(*(dispatch(f"{n}", tokens=480) for n in range(12)))
        await scheduler.until(lambda: scheduler.tokens.get("0"))
        app.drain()
        await asyncio.wait_for(app.wait(), 60)
        await scheduler.reader
        ends = {e.dispatch_id for e in [*scheduler.of("finished"), *scheduler.of("rejected")]}
        assert ends == {f"{n}" for n in range(12)}
        assert all(r.retryable for r in scheduler.of("rejected"))


async def test_a_scheduler_that_does_not_read_is_cut_off(tiny_base: Path, tiny_store: DiskStore) -> None:
    settings = {"outbox_messages": 4, "outbox_timeout": 0.5, "max_seats": 16}
    async with running(tiny_base, tiny_store, **settings) as app:
        options = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{app.port}", options=options) as channel:
            stub = executor_pb2_grpc.ExecutorStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Execute()
            many = [dispatch(f"{n}", tokens=480, logprobs=100, prompt_logprobs=100) for n in range(16)]
            batch = executor_pb2.DispatchBatch(dispatches=many)
            await call.write(executor_pb2.ExecutorCommand(dispatch=batch))
            async with asyncio.timeout(60):
                while not app.hub.num_live:
                    await asyncio.sleep(0.01)
                while app.hub.streams:
                    await asyncio.sleep(0.05)
            await idle(app)
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_before_the_model_is_there_it_is_alive_and_says_so(
    tiny_base: Path, tiny_store: DiskStore
) -> None:
    config = ExecutorConfig(model=str(tiny_base), **SMALL | {"listen": "127.0.0.1:0", "metrics_port": -1})
    async with (
        ExecutorApp(config, tiny_store) as app,
        grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel,
    ):
        app.hub.info = None
        stub = executor_pb2_grpc.ExecutorStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Describe(executor_pb2.DescribeRequest())
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=""))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await app.ready.wait()


async def test_a_stuck_step_fails_liveness(tiny_base: Path, tiny_store: DiskStore) -> None:
    async with (
        running(tiny_base, tiny_store, step_timeout=0.3) as app,
        connected(app) as scheduler,
        grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        release = threading.Event()

        def hang(engine: Engine) -> None:
            engine._runner.launch = lambda plan: release.wait(30)  # type: ignore

        app._engine.submit(hang)
        await scheduler.dispatch(dispatch("x"))
        async with asyncio.timeout(20):
            while True:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=1)
                if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    break
                await asyncio.sleep(0.05)
        await scheduler.until(lambda: scheduler.of("load")[-1].last_step_age_ms > 300)
        assert scheduler.of("load")[-1].waiting == 1
        release.set()


async def test_an_engine_that_keeps_failing_rejects_then_ends(tiny_base: Path, tiny_store: DiskStore) -> None:
    async with running(tiny_base, tiny_store) as app, connected(app) as scheduler:

        def fail(plan: object) -> None:
            raise ZeroDivisionError("secret")

        def break_it(engine: Engine) -> None:
            engine._runner.launch = fail  # type: ignore

        app._engine.submit(break_it)
        for name in ("a", "b"):
            await scheduler.dispatch(dispatch(name))
            await scheduler.ended(name)
        for rejected in scheduler.of("rejected"):
            assert (rejected.reason, rejected.retryable) == ("INTERNAL", False)
            assert "secret" not in rejected.message
        await scheduler.dispatch(dispatch("c"))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(app.wait(), 30)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await scheduler.reader
        assert await scheduler.call.code() is grpc.StatusCode.UNAVAILABLE
        assert not app.ready.is_set()


async def test_a_port_in_use_is_one_clear_error(
    app: ExecutorApp, tiny_base: Path, tiny_store: DiskStore
) -> None:
    for taken in (
        {"listen": f"127.0.0.1:{app.port}", "metrics_port": -1},
        {"listen": "127.0.0.1:0", "metrics_port": app.metrics_port},
    ):
        config = ExecutorConfig(model=str(tiny_base), **SMALL | taken)
        with pytest.raises(StartError, match=r"127\.0\.0\.1"):
            async with ExecutorApp(config, tiny_store):
                pass


@pytest.mark.parametrize("broken", ["take", "tell_loads"])
async def test_a_bug_beside_the_engine_ends_the_process(
    tiny_base: Path, tiny_store: DiskStore, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Not in silence: schedulers would wait for tokens, or reports, that never come."""

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError

    async with running(tiny_base, tiny_store) as app, connected(app) as scheduler:
        monkeypatch.setattr(app.hub, broken, fail)
        await scheduler.dispatch(dispatch("a"))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(app.wait(), 30)
