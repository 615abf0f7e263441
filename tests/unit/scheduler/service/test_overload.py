"""More calls than a scheduler takes, over real sockets: what it refuses is cheap, typed, and told at once."""

import asyncio
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorafleet.errors import ANSWER_ID
from lorafleet.v1 import inference_pb2
from scheduler import inference_service
from scheduler.app import POOL_THREADS
from tests.support.services.failures import failure_of
from tests.support.services.scheduler_house import House, generate, open_house, read
from tests.support.services.scheduling import until


@contextmanager
def busy(house: House) -> Iterator[None]:
    """The pool works on something else: what needs it waits."""
    done = threading.Event()
    for _ in range(POOL_THREADS):
        house.scheduler._pool.submit(done.wait)
    try:
        yield
    finally:
        done.set()


async def refused(call: grpc.aio.UnaryUnaryCall[object, object]) -> tuple[str, str, float | None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    found = failure_of(caught.value)
    return found.code, found.reason, found.retry_s


async def test_more_than_max_admitting_are_refused_before_they_cost_anything(model: Path) -> None:
    async with open_house(model, max_admitting=2) as house:
        with busy(house):
            first = house.inference.Generate(generate())
            second = house.inference.Tokenize(inference_pb2.TokenizeRequest(text="The quick"))
            await until(lambda: house.scheduler._admission._admitting.total == 2)
            for call in (
                house.inference.Generate(generate()),
                house.inference.Tokenize(inference_pb2.TokenizeRequest(text="x")),
            ):
                code, reason, delay_s = await refused(call)
                assert (code, reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL") and delay_s
        assert (await first).token_ids and (await second).token_ids
        assert (await house.inference.Generate(generate())).token_ids


async def test_a_full_queue_refuses_before_it_tokenizes(model: Path) -> None:
    async with open_house(model, max_queued=1) as house:
        [chunk, *_] = await read(house.inference.GenerateStream(generate()))
        told = ((ANSWER_ID, chunk.answer_id),)
        house.fake.frozen = True
        limit = house.fake.hello.max_seats + 1
        calls = []
        for count in range(1, limit + 1):
            calls.append(house.inference.Generate(generate()))
            await until(lambda count=count: len(house.fake.dispatches) > min(count, limit - 1))  # type: ignore[misc]
        await until(lambda: house.scheduler.dispatcher.num_live == limit)
        with busy(house):
            code, reason, delay_s = await refused(house.inference.Generate(generate()))
            assert (code, reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL") and delay_s > 0
        calls.append(house.inference.Generate(generate(), metadata=told))
        await until(lambda: house.scheduler.dispatcher.num_live == limit + 1)
        resumed = generate(resume=inference_pb2.Resume(seed=1, answer_id=told[0][1]))
        code, reason, delay_s = await refused(house.inference.Generate(resumed))
        assert (code, reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL") and delay_s > 0
        house.fake.frozen = False
        await asyncio.gather(*calls)


async def test_calls_that_come_during_a_pause_of_the_loop_are_all_taken_up(house: House) -> None:
    """By itself gRPC drops a part of them, beyond 1000."""
    ends: list[grpc.Future] = []
    sent = threading.Event()

    def call_often() -> None:
        with grpc.insecure_channel(house.scheduler.address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            calls = [check.future(health_pb2.HealthCheckRequest()) for _ in range(1500)]
            sent.set()
            ends.extend(call.code() for call in calls)

    caller = threading.Thread(target=call_often)
    caller.start()
    sent.wait(60)
    time.sleep(0.5)  # Until the last of them has come; the loop stands still.
    await asyncio.to_thread(caller.join, 60)
    assert Counter(ends) == {grpc.StatusCode.OK: 1500}


async def test_one_tenant_s_listings_leave_threads_to_others(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, over = threading.Semaphore(0), threading.Event()

    def read_all(*_: object) -> tuple[list[inference_pb2.Model], str]:
        reading.release()
        over.wait(60)
        return [], ""

    monkeypatch.setattr(inference_service, "list_models", read_all)
    listing = [
        asyncio.ensure_future(house.inference.ListModels(inference_pb2.ListModelsRequest())) for _ in range(4)
    ]
    for _ in listing:
        await asyncio.to_thread(reading.acquire, timeout=60)
    code, reason, retry_s = await refused(house.inference.ListModels(inference_pb2.ListModelsRequest()))
    assert (code, reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_LISTINGS")
    assert retry_s is not None and retry_s >= 0.1
    assert (await house.inference.Generate(generate())).usage.completion_tokens == 12
    over.set()
    await asyncio.gather(*listing)


async def test_who_has_no_other_request_under_check_is_let_in_beside_a_flood(
    model: Path, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(
        "".join(
            f'[[tokens]]\nsha256 = "{hashlib.sha256(who.encode()).hexdigest()}"\ntenant = "{who}"\n'
            'rights = ["infer"]\n'
            for who in ("flood", "calm")
        )
    )
    async with open_house(model, max_admitting=2, tokens_file=tokens) as house:

        def ask(who: str) -> grpc.aio.UnaryUnaryCall[object, object]:
            return house.inference.Generate(generate(), metadata=(("authorization", f"Bearer {who}"),))

        with busy(house):
            calls = [asyncio.ensure_future(ask("flood")) for _ in range(2)]
            await until(lambda: house.scheduler._admission._admitting["flood"] == 2)
            assert (await refused(ask("flood")))[1] == "QUEUE_FULL"
            calls.append(asyncio.ensure_future(ask("calm")))
            await until(lambda: house.scheduler._admission._admitting["calm"] == 1)
        for answer in await asyncio.gather(*calls):
            assert answer.usage.completion_tokens == 12
