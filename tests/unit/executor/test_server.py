"""The executor over a real socket, with a real engine on its thread."""

import asyncio
import re
import threading
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from adapter_store import CachedStore, DiskStore, Weights
from executor.app import ExecutorApp
from executor.build import build_engine
from executor.config import ExecutorConfig
from executor.engine_thread import Command
from executor.errors import StartError
from executor.server import ENDS_WITH_STEPS, SERVICE
from lorafleet.v1 import adapters_pb2, executor_pb2, executor_pb2_grpc
from tests.support.engines.driver import SMALL
from tests.support.engines.executor_app import Scheduler, connected, dispatch, idle, running

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(tiny_base: Path, tiny_store: DiskStore) -> AsyncIterator[ExecutorApp]:
    async with running(tiny_base, tiny_store) as app:
        yield app


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

        def told() -> set[int]:
            return {load.free_seats for load in scheduler.of("load") if load.received_dispatches == 3}

        await scheduler.until(lambda: told() >= {13, 16})
        deltas = scheduler.of("residency")
        start = scheduler.events[0].hello.residency_number
        assert [delta.number for delta in deltas] == list(range(start + 1, start + 1 + len(deltas)))
        copies = {(entry.digest, entry.tier) for delta in deltas for entry in delta.added}
        assert (digests[0], adapters_pb2.RESIDENCY_TIER_SLOT) in copies
    await idle(app)


async def test_ends_come_with_their_step_where_the_scheduler_asks_for_it(app: ExecutorApp) -> None:
    async with connected(app, ENDS_WITH_STEPS) as scheduler:
        await scheduler.dispatch(dispatch("a"), dispatch("b"), dispatch("c", tokens=3))
        ends: dict[str, int] = {}

        def ended() -> bool:
            steps = scheduler.of("step")
            ends.update({end.dispatch_id: index for index, step in enumerate(steps) for end in step.finished})
            return len(ends) == 3

        await scheduler.until(ended)
        steps = scheduler.of("step")
        assert sum(len(step.finished) for step in steps) == 3
        assert all(name in steps[index].dispatch_ids for name, index in ends.items())
        assert all(name not in step.dispatch_ids for name, at in ends.items() for step in steps[at + 1 :])
        assert {name: len(tokens) for name, tokens in scheduler.tokens.items()} == {"a": 8, "b": 8, "c": 3}
        assert not scheduler.of("finished")
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


async def test_every_scheduler_hears_who_waits_for_a_slot_on_any_stream(
    app: ExecutorApp, strangers: list[str]
) -> None:
    def cold(scheduler: Scheduler) -> list[str]:
        return [wait.digest for wait in scheduler.of("load")[-1].cold]

    def waits(digest: str, waiting_ms: int) -> executor_pb2.Prefetch:
        return executor_pb2.Prefetch(digest=digest, expected_uses=1, waiting_ms=waiting_ms)

    one, two, three = strangers[:3]  # not loaded yet
    async with connected(app) as here:
        async with connected(app) as there:
            await here.send(prefetch=waits(one, 5_000))
            await there.send(prefetch=waits(two, 9_000))
            await there.send(prefetch=waits(one, 2_000))
            await there.send(prefetch=waits(three, 1))
            for scheduler in (here, there):
                await scheduler.until(lambda scheduler=scheduler: cold(scheduler) == [two, one, three])
            told = here.of("load")[-1].cold
            assert told[0].waiting_ms >= 9_000 and 5_000 <= told[1].waiting_ms < 9_000
            # Still a hint to load it.
            await here.until(lambda: any(e.digest == two for d in here.of("residency") for e in d.added))
            await here.send(prefetch=waits(one, 0))
            await there.until(lambda: there.of("load")[-1].cold[1].waiting_ms < 5_000)
            assert cold(there) == [two, one, three]
            await there.dispatch(dispatch("x", digest=one, tokens=2))
            for scheduler in (here, there):
                await scheduler.until(lambda scheduler=scheduler: cold(scheduler) == [two, three])
            await there.ended("x")
        await here.until(lambda: not cold(here))
    await idle(app)


async def test_a_wait_that_its_scheduler_does_not_tell_again_is_over_and_its_end_is_no_hint(
    app: ExecutorApp, strangers: list[str]
) -> None:
    """Also when the end comes late, from a scheduler that stood still."""
    one, two = strangers[3], "sha256:" + "0" * 64

    def told(digest: str, waiting_ms: int, lasts_ms: int) -> executor_pb2.Prefetch:
        return executor_pb2.Prefetch(digest=digest, expected_uses=1, waiting_ms=waiting_ms, lasts_ms=lasts_ms)

    async with connected(app) as scheduler:
        assert scheduler.events[0].hello.knows_waits
        await scheduler.send(prefetch=told(one, 0, 3_000))  # No hint: nothing is loaded.
        await scheduler.send(prefetch=told(two, 500, 100))
        await scheduler.until(lambda: any(load.cold for load in scheduler.of("load")))
        await scheduler.until(lambda: not scheduler.of("load")[-1].cold)
        assert not any(e.digest == one for d in scheduler.of("residency") for e in d.added)
    await idle(app)


@pytest.mark.parametrize("how", ["cancel", "half-close"])
async def test_a_scheduler_that_goes_away_frees_all_within_two_steps(
    app: ExecutorApp, digests: list[str], how: str
) -> None:
    steps: list[int] = []
    gone: list[int] = []
    engine, on_events, submit = app._engine, app._engine._on_events, app._engine.submit

    def cancelled(command: Command) -> None:
        submit(command)
        gone.append(len(steps))

    async with connected(app) as scheduler:
        await scheduler.dispatch(dispatch("x", tokens=480, digest=digests[1]), dispatch("y", tokens=480))
        await scheduler.until(lambda: len(scheduler.tokens.get("x", [])) >= 3)
        # On the engine's thread, that no turn of the loop, which may be late, comes between.
        engine._on_events = lambda events: (steps.append(events.status.running), on_events(events))  # type: ignore
        engine.submit = cancelled  # type: ignore[method-assign]
        try:
            if how == "cancel":
                scheduler.call.cancel()
            else:
                await scheduler.call.done_writing()
            async with asyncio.timeout(60):
                while app.hub.streams:
                    await asyncio.sleep(0)
            await idle(app)
        finally:
            engine._on_events, engine.submit = on_events, submit  # type: ignore[method-assign]
    after = steps[gone[0] :] if gone else []  # none: where the loop is very late, they had ended before
    assert [running for running in after if running][2:] == []


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


class HeldStore(DiskStore):
    """Gives an adapter out once its gate is open."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked, self.gate = threading.Event(), threading.Event()

    def open(self, digest: str) -> Weights:
        self.asked.set()
        self.gate.wait(60)
        return super().open(digest)


async def test_a_drop_is_answered_after_a_load_under_way_and_its_copies_are_gone(
    tiny_base: Path, store_folder: Path, digests: list[str], tmp_path: Path
) -> None:
    """In host memory and on disk: residency after the answer names none."""
    store = HeldStore(store_folder)
    async with (
        running(tiny_base, CachedStore(store, tmp_path, 1 << 30)) as app,
        connected(app) as asking,
        connected(app) as other,
    ):
        assert asking.events[0].hello.tells_drops
        await asking.dispatch(dispatch("a", digest=digests[0]))
        await asyncio.to_thread(store.asked.wait, 60)
        await asking.send(cancel=executor_pb2.Cancel(dispatch_ids=["a"]))
        await asking.send(drop=executor_pb2.DropAdapter(digest=digests[0], number=7))
        await asking.send(drop=executor_pb2.DropAdapter(digest=digests[1], number=8))
        await asking.until(lambda: asking.of("dropped"))
        assert [done.number for done in asking.of("dropped")] == [8]
        store.gate.set()
        await asking.until(lambda: len(asking.of("dropped")) == 2)
        copies: set[tuple[str, int]] = set()
        for event in asking.events:
            copies |= {(entry.digest, entry.tier) for entry in event.residency.added}
            copies -= {(entry.digest, entry.tier) for entry in event.residency.removed}
        assert copies == set() and not any((tmp_path / "entries").iterdir())
        await other.send(drop=executor_pb2.DropAdapter(digest=digests[0]))  # asks for no answer
        await other.send(drop=executor_pb2.DropAdapter(digest=digests[0], number=1))
        await other.until(lambda: other.of("dropped"))
        assert [done.number for done in other.of("dropped")] == [1] and len(asking.of("dropped")) == 2


async def test_more_dispatches_than_seats_are_handed_back(app: ExecutorApp) -> None:
    async with connected(app) as scheduler:
        names = [f"{n}" for n in range(20)]
        await scheduler.dispatch(*(dispatch(name) for name in names))
        await scheduler.ended(*names)
        rejected = {r.dispatch_id: (r.reason, r.retryable) for r in scheduler.of("rejected")}
        assert rejected == dict.fromkeys(["16", "17", "18", "19"], ("NO_SEATS", True))


async def test_who_was_told_of_a_seat_that_another_took_has_the_next_one(app: ExecutorApp) -> None:
    """Whose request was accepted first goes first."""
    async with connected(app) as one, connected(app) as two:
        await one.dispatch(*(dispatch(f"{n}", tokens=60) for n in range(16)))
        await one.until(lambda: one.tokens)
        await two.dispatch(*(dispatch(f"{n}", tokens=2, waited_ms=1000 * n) for n in range(1, 8)))
        await two.send(cancel=executor_pb2.Cancel(dispatch_ids=["6", "7"]))
        async with connected(app) as three:
            await three.dispatch(dispatch("untold"))
            await three.ended("untold")
            assert [refused.reason for refused in three.of("rejected")] == ["NO_SEATS"]
        assert not two.tokens and two.of("load")[-1].free_seats == 0
        await one.send(cancel=executor_pb2.Cancel(dispatch_ids=["0"]))  # a seat for one after the other
        await two.ended(*(f"{n}" for n in range(1, 6)))
        assert list(two.tokens) == [f"{n}" for n in range(5, 0, -1)]
        assert not two.of("rejected") and not one.of("rejected")
    await idle(app)


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
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await scheduler.dispatch(dispatch("m", digest=digests[0], adapter="acme/support"))
        await scheduler.ended("m")
        page = await asyncio.to_thread(scrape, app.metrics_port)
        resident = f'lorafleet_executor_adapter_resident{{digest="{digests[0]}",tier="slot"}} 1.0'
        assert resident in page
        assert 'max_lora="2"' in page and "vllm:num_requests_running" in page
        (listed,) = re.findall(r'vllm:lora_requests_info\{.*running_lora_adapters="([^"]*)"', page)
        assert "acme/support" in listed.split(",") and digests[0] not in listed
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


async def test_a_port_in_use_is_one_clear_error(
    app: ExecutorApp, tiny_base: Path, tiny_store: DiskStore
) -> None:
    for taken in (
        {"listen": f"127.0.0.1:{app.port}", "metrics_port": -1},
        {"listen": "127.0.0.1:0", "metrics_port": app.metrics_port},
    ):
        config = ExecutorConfig(model=str(tiny_base), **SMALL | taken)
        with pytest.raises(StartError, match=r"127\.0\.0\.1"):
            async with ExecutorApp(config, tiny_store, build_engine):
                pass
