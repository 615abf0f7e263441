"""How an executor comes up, drains, and ends: of itself, by a bug, or stuck."""

import asyncio
import contextlib
import itertools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from adapter_store import DiskStore
from executor.app import ExecutorApp
from executor.build import build_engine
from executor.config import ExecutorConfig
from executor.engine import Engine
from executor.errors import RankLost
from executor.server import SERVICE
from lorafleet.v1 import executor_pb2, executor_pb2_grpc
from tests.support.engines.driver import SMALL
from tests.support.engines.executor_app import connected, dispatch, idle, running
from tests.support.services.proxy import Proxy

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(channel: grpc.aio.Channel, service: str = "") -> int:
    """As a probe asks; "" is liveness."""
    request = health_pb2.HealthCheckRequest(service=service)
    answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
    return int(answer.status)


async def test_drain_finishes_accepted_work_and_refuses_new(tiny_base: Path, tiny_store: DiskStore) -> None:
    async with running(tiny_base, tiny_store) as app, connected(app) as scheduler:
        go_on = threading.Event()

        def hold(engine: Engine) -> None:
            launch, beats = engine._runner.launch_forward, itertools.count()
            held = lambda plan: (next(beats) < 3 or go_on.wait(60)) and launch(plan)  # noqa: E731
            engine._runner.launch_forward = held  # type: ignore

        app._engine.submit(hold)  # the drain is not over before all below has been asked
        await scheduler.dispatch(dispatch("old", tokens=200))
        await scheduler.until(lambda: scheduler.tokens.get("old"))
        app.drain()
        await scheduler.dispatch(dispatch("new"))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel:
            assert (await health(channel, SERVICE), await health(channel)) == (NOT_SERVING, SERVING)
        go_on.set()
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


async def test_what_a_scheduler_sent_that_vanished_is_cancelled(
    tiny_base: Path, tiny_store: DiskStore
) -> None:
    """Its machine has lost its power: no end of the stream is told, and no ping answered."""
    async with running(tiny_base, tiny_store, keepalive_time=0.4) as app:
        with Proxy(app.port) as proxy:
            async with connected(app, port=proxy.port) as scheduler:
                await asyncio.sleep(1.2)  # Several pings in silence, each answered.
                await scheduler.dispatch(dispatch("x", tokens=480))
                await scheduler.until(lambda: scheduler.tokens.get("x"))
                proxy.swallow()
            async with asyncio.timeout(10):
                while app.hub.streams:
                    await asyncio.sleep(0.01)
            await idle(app)


async def test_while_the_model_loads_it_is_alive_and_says_so(tiny_base: Path, tiny_store: DiskStore) -> None:
    """For as long as it takes: a probe does not restart it meanwhile."""
    loaded = threading.Event()

    def build(*arguments: Any, **callbacks: Any) -> Engine:
        loaded.wait(60)
        return build_engine(*arguments, **callbacks)

    config = ExecutorConfig(model=str(tiny_base), **SMALL | {"listen": "127.0.0.1:0", "metrics_port": -1})
    async with (
        ExecutorApp(config, tiny_store, build) as app,
        grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel,
    ):
        stub = executor_pb2_grpc.ExecutorStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Describe(executor_pb2.DescribeRequest())
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await health(channel) == SERVING
        assert await health(channel, SERVICE) == NOT_SERVING
        loaded.set()
        await app.ready.wait()
        async with asyncio.timeout(60):
            while await health(channel, SERVICE) != SERVING:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("steps_ahead", ["false", "true"])
async def test_slow_steps_with_work_waiting_are_no_stuck_ones(
    tiny_base: Path, tiny_store: DiskStore, monkeypatch: pytest.MonkeyPatch, steps_ahead: str
) -> None:
    """Each takes all but a moment of what it may."""
    now, begun, go_on = 1000, threading.Semaphore(0), threading.Semaphore(0)
    monkeypatch.setattr("executor.engine_thread.time", SimpleNamespace(monotonic=lambda: now))
    settings = {"step_timeout": 60.0, "async_scheduling": steps_ahead, "num_kv_blocks": 8}
    async with (
        running(tiny_base, tiny_store, **settings) as app,
        connected(app) as scheduler,
        grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel,
    ):

        def slow_down(engine: Engine) -> None:
            launch = engine._runner.launch_forward

            def slowly(plan: Any) -> Any:
                begun.release()
                go_on.acquire(timeout=60)
                return launch(plan)

            engine._runner.launch_forward = slowly  # type: ignore[method-assign]

        app._engine.submit(slow_down)
        names = [f"{number}" for number in range(16)]
        await scheduler.dispatch(*(dispatch(name) for name in names))
        for seconds in (59, 58, 57, 56):
            assert await asyncio.to_thread(begun.acquire, timeout=60)
            now += seconds
            app.hub.tell_loads()
            app._tell_health()  # both are done again and again anyway
            assert (await health(channel), await health(channel, SERVICE)) == (SERVING, SERVING)
            await scheduler.until(lambda s=seconds: scheduler.of("load")[-1].last_step_age_ms == 1000 * s)
            assert scheduler.of("load")[-1].waiting
            go_on.release()
        go_on.release(100)
        await scheduler.ended(*names)
        assert not scheduler.of("rejected")


async def test_a_stuck_step_fails_liveness(tiny_base: Path, tiny_store: DiskStore) -> None:
    """A process that answers while no token comes out is not healthy."""
    async with (
        running(tiny_base, tiny_store, step_timeout=0.3) as app,
        connected(app) as scheduler,
        grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel,
    ):
        release = threading.Event()

        def hang(engine: Engine) -> None:
            engine._runner.launch_forward = lambda plan: release.wait(120)  # type: ignore

        app._engine.submit(hang)
        await scheduler.dispatch(dispatch("x"))
        async with asyncio.timeout(60):
            while await health(channel) != NOT_SERVING:
                await asyncio.sleep(0.05)
        await scheduler.until(lambda: scheduler.of("load")[-1].last_step_age_ms > 300)
        assert scheduler.of("load")[-1].waiting == 1
        release.set()


async def test_what_comes_and_ends_in_one_step_is_reported_with_it(
    tiny_base: Path, tiny_store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room is what it was before, but no scheduler uses it again before it hears so."""
    monkeypatch.setattr("executor.app.LOAD_INTERVAL_S", 3600.0)
    async with running(tiny_base, tiny_store) as app, connected(app) as scheduler:
        await scheduler.dispatch(*(dispatch(name, tokens=1) for name in "abc"))
        await scheduler.ended(*"abc")
        await scheduler.until(lambda: scheduler.of("load")[-1].received_dispatches == 3)
        assert scheduler.of("load")[-1].free_seats == 16


async def test_a_stuck_step_of_several_ranks_ends_the_executor(
    tiny_base: Path, tiny_store: DiskStore, store_folder: Path
) -> None:
    """A collective over NCCL may wait for ever, where gloo gives up by itself."""
    two = {"store": str(store_folder), "tensor_parallel_size": 2, "torch_threads": 1, "step_timeout": 2.0}
    async with running(tiny_base, tiny_store, **two) as app, connected(app) as scheduler:
        release = threading.Event()

        def hang(engine: Engine) -> None:
            engine._runner.launch_forward = lambda plan: release.wait(60)  # type: ignore

        app._engine.submit(hang)
        await scheduler.dispatch(dispatch("x"))
        with pytest.raises(RankLost, match="no progress for 2 s"):
            await asyncio.wait_for(app.wait(), 50)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await scheduler.reader
        assert await scheduler.call.code() is grpc.StatusCode.UNAVAILABLE
        release.set()


async def test_an_engine_that_keeps_failing_rejects_then_ends(tiny_base: Path, tiny_store: DiskStore) -> None:
    async with running(tiny_base, tiny_store) as app, connected(app) as scheduler:

        def fail(plan: object) -> None:
            raise ZeroDivisionError("secret")

        def break_it(engine: Engine) -> None:
            engine._runner.launch_forward = fail  # type: ignore

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
