"""Large messages that calls still work on: bounded by caller and in all, and small ones are never refused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

import grpc
import pytest

from lorafleet.doors import Door, Handlers, Limits, Refused, message_is_done, paths
from lorafleet.doors.bodies import LARGE, Bodies
from lorafleet.doors.refusals import TooManyMessages
from lorafleet.v1 import inference_pb2
from lorafleet.v1.inference_pb2_grpc import InferenceServicer, InferenceStub, add_InferenceServicer_to_server

LIMITS = Limits(other_bytes=1 << 20, body_bytes=6 * LARGE)  # Of one caller two and a half, in all five.
TEXT = "a" * (LARGE + LARGE // 8)


class House:
    def who(self, context: grpc.aio.ServicerContext) -> str:
        return str(dict(context.invocation_metadata())["who"])

    def refused(self, context: grpc.aio.ServicerContext, method: str, error: Exception) -> None:
        assert isinstance(error, TooManyMessages)

    async def abort(self, context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
        assert isinstance(error, Refused) and error.retry_after_s
        await context.abort(error.code, str(error))
        raise AssertionError


class Slow(InferenceServicer):
    """Answers once it is let go. `early`: it says before that its message is done."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.early = False
        self.began = asyncio.Semaphore(0)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        if self.early:
            message_is_done()
        self.began.release()
        await self.go_on.wait()
        return inference_pb2.TokenizeResponse()


class Calls:
    def __init__(self, stub: InferenceStub, slow: Slow) -> None:
        self.slow = slow
        self._stub = stub
        self._begun: list[asyncio.Task[object]] = []

    def call(self, who: str, text: str = TEXT) -> grpc.aio.Call:
        request = inference_pb2.TokenizeRequest(text=text)
        return self._stub.Tokenize(request, metadata=(("who", who),), timeout=30)

    async def begin(self, who: str, text: str = TEXT) -> None:
        """The call is worked on."""
        self._begun.append(asyncio.ensure_future(self._whole(who, text)))
        await self.slow.began.acquire()

    async def end(self) -> None:
        """All that were begun are answered."""
        self.slow.go_on.set()
        await asyncio.gather(*self._begun)

    async def code(self, who: str) -> grpc.StatusCode:
        return await self.call(who).code()  # type: ignore[no-any-return]

    async def _whole(self, who: str, text: str) -> object:
        return await self.call(who, text)


@asynccontextmanager
async def served() -> AsyncIterator[Calls]:
    server, slow = paths.make_server(()), Slow()
    add_InferenceServicer_to_server(slow, Handlers(server, Door(House(), LIMITS)))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Calls(InferenceStub(channel), slow)
    finally:
        await server.stop(None)


async def test_a_caller_has_its_share_and_leaves_the_rest_to_others() -> None:
    async with served() as calls:
        for who in ("a", "a", "b", "b"):
            await calls.begin(who)
        assert await calls.code("a") is grpc.StatusCode.RESOURCE_EXHAUSTED
        await calls.begin("c")
        assert await calls.code("d") is grpc.StatusCode.RESOURCE_EXHAUSTED
        await calls.begin("a", text="small")
        await calls.end()
        assert await calls.code("a") is grpc.StatusCode.OK


async def test_a_message_that_is_done_takes_no_room_while_its_call_goes_on() -> None:
    async with served() as calls:
        calls.slow.early = True
        for _ in range(10):
            await calls.begin("a")
        await calls.end()


async def test_large_ones_are_parsed_one_by_one_with_a_rest_between() -> None:
    bodies, running, most = Bodies(100), 0, 0

    async def parse() -> None:
        nonlocal running, most
        async with bodies.parsing():
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    await asyncio.gather(*(parse() for _ in range(5)))
    assert most == 1
    with pytest.raises(ValueError, match="no message"):
        async with bodies.parsing():
            raise ValueError("no message")
    async with asyncio.timeout(20), bodies.parsing():
        """What fails keeps nobody out."""


def test_who_has_none_may_have_one_of_any_size() -> None:
    bodies = Bodies(100)
    bodies.take("a", 90)
    for who, size in (("a", 1), ("b", 11)):
        with pytest.raises(TooManyMessages):
            bodies.take(who, size)
    bodies.give_back("a", 90)
    bodies.take("a", 500)
    bodies.give_back("a", 500)
    bodies.take("b", 50)
    bodies.take("a", 50)


def test_a_caller_s_share_may_be_its_own() -> None:
    bodies = Bodies(100, lambda caller: {"small": 10}.get(caller, 0))
    bodies.take("small", 8)
    with pytest.raises(TooManyMessages):
        bodies.take("small", 3)
    bodies.take("any", 80)
    bodies.take("any", 12)
