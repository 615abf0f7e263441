"""A real server behind a door: nothing of a body is read before it is known who calls."""

import asyncio
import gc
import logging
import socket
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import NoReturn

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc

from lorafleet.doors import Door, Handlers, Health, Limits, PeerRates, Refused, paths
from lorafleet.errors import REQUEST_ID
from lorafleet.v1 import adapters_pb2, adapters_pb2_grpc, fleet_pb2, fleet_pb2_grpc, inference_pb2
from lorafleet.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from tests.support.flood import http2

Code = grpc.StatusCode
TOKENIZE = "/lorafleet.v1.Inference/Tokenize"
STREAM = "/lorafleet.v1.Inference/GenerateStream"
PUSH = "/lorafleet.v1.Adapters/Push"
CHECK = "/grpc.health.v1.Health/Check"
ME = (("who", "me"),)
LIMITS = Limits({"lorafleet.v1.Inference": 1000, "lorafleet.v1.Inference/GenerateStream": 10})


class House:
    def __init__(self) -> None:
        self.told: list[str] = []

    def who(self, context: grpc.aio.ServicerContext) -> str:
        for key, value in context.invocation_metadata():
            if key == "who":
                return str(value)
        raise Nobody("say who you are")

    def refused(self, context: grpc.aio.ServicerContext, method: str, error: Exception) -> None:
        self.told.append(f"{method.rpartition('/')[2]} {type(error).__name__}")

    async def abort(self, context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
        assert isinstance(error, Refused)
        await context.abort(error.code, str(error))
        raise AssertionError


class Nobody(Refused):
    code = Code.UNAUTHENTICATED


class Frame:
    """In a handler: gone when nobody has the handler's variables any more."""


class Inference(InferenceServicer):
    def __init__(self) -> None:
        self.frames: list[weakref.ref[Frame]] = []

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        frame = Frame()
        self.frames.append(weakref.ref(frame))
        if request.text == "fail":
            try:
                self._fail(frame)
            except ValueError:
                await context.abort(Code.FAILED_PRECONDITION, "as asked")
        return inference_pb2.TokenizeResponse(max_model_len=7)

    def _fail(self, frame: Frame) -> NoReturn:
        error = ValueError("as asked")
        raise error from error

    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateChunk]:
        for number in range(3):
            yield inference_pb2.GenerateChunk(output_index=number)


class Adapters(adapters_pb2_grpc.AdaptersServicer):
    async def Push(
        self, request_iterator: AsyncIterator[adapters_pb2.PushRequest], context: grpc.aio.ServicerContext
    ) -> adapters_pb2.PushResponse:
        number = len([each async for each in request_iterator])
        return adapters_pb2.PushResponse(created=number == 2)


class Served:
    """A server behind a door, and one channel to it."""

    def __init__(self, channel: grpc.aio.Channel, address: str, house: House, inference: Inference) -> None:
        self.channel, self.address, self.house, self.inference = channel, address, house, inference

    def call(
        self, method: str, *messages: bytes, metadata: tuple[tuple[str, str], ...] = ME
    ) -> grpc.aio.Call:
        return self.channel.stream_stream(method)(iter(messages), metadata=metadata, timeout=20)

    async def answers(self, method: str, *messages: bytes) -> list[bytes]:
        return [each async for each in self.call(method, *messages)]

    async def code(
        self, method: str, *messages: bytes, metadata: tuple[tuple[str, str], ...] = ME
    ) -> grpc.StatusCode:
        return await status(self.call(method, *messages, metadata=metadata))


async def status(call: grpc.aio.Call) -> grpc.StatusCode:
    """Its answers come first."""
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return await call.code()  # type: ignore[no-any-return]


@asynccontextmanager
async def served(limits: Limits = LIMITS, rates: PeerRates | None = None) -> AsyncIterator[Served]:
    server, house, inference = paths.make_server(()), House(), Inference()
    handlers = Handlers(server, Door(house, limits, rates))
    add_InferenceServicer_to_server(inference, handlers)
    adapters_pb2_grpc.add_AdaptersServicer_to_server(Adapters(), handlers)
    health_pb2_grpc.add_HealthServicer_to_server(Health(), handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        address = f"127.0.0.1:{port}"
        async with grpc.aio.insecure_channel(address) as channel:
            yield Served(channel, address, house, inference)
    finally:
        await server.stop(None)


async def test_methods_are_served_as_ever_and_unknown_ones_told() -> None:
    text = inference_pb2.TokenizeRequest(text="a").SerializeToString()
    async with served() as at:
        [answer] = await at.answers(TOKENIZE, text)
        assert inference_pb2.TokenizeResponse.FromString(answer).max_model_len == 7
        assert len(await at.answers(STREAM, b"")) == 3
        [pushed] = await at.answers(PUSH, b"", b"")
        assert adapters_pb2.PushResponse.FromString(pushed).created
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await fleet_pb2_grpc.FleetStub(at.channel).Cordon(fleet_pb2.CordonRequest())
        assert error.value.code() is Code.UNIMPLEMENTED
        assert await at.code("/lorafleet.v1.Inference/ListModels", b"") is Code.UNIMPLEMENTED
    assert not at.house.told


@pytest.mark.parametrize("path", [b"/lorafleet.v1.Inference/\xff\xfe", b"\xff", b"", b"/", b"//", b"/x\0y"])
async def test_a_path_that_is_no_text_ends_no_server(path: bytes) -> None:
    """Nor the streams that it has: gRPC's own server ends with all of them."""
    async with served() as at:
        before = at.call(PUSH)
        for _ in range(3):
            assert await asyncio.to_thread(code_of_path, at.address, path) in (
                Code.UNIMPLEMENTED,
                Code.UNKNOWN,
            )
        assert await at.code(CHECK, b"") is Code.OK
        assert await status(before) is Code.OK


async def test_metadata_that_is_no_text_is_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as at:
        await asyncio.to_thread(call_by_hand, at.address, TOKENIZE.encode(), b"s\xe9cret\xff")
        assert await at.code(TOKENIZE, b"") is Code.OK
    assert len(at.inference.frames) == 2 and not caplog.records


def call_by_hand(address: str, path: bytes, who: bytes) -> None:
    """As no gRPC client would: they do not send such values. Returns when there is an answer."""
    headers = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x"}
    headers |= {b"content-type": b"application/grpc", b"te": b"trailers", b"who": who}
    block = b"".join(b"\0" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in headers.items())
    frames = [(4, 0, 0, b""), (1, 4, 1, block), (0, 1, 1, bytes(5))]
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        for kind, flags, stream, payload in frames:
            head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
            connection.sendall(head + payload)
        seen = b""
        while b"grpc-status" not in seen:
            seen += (got := connection.recv(65536))
            assert got, "the connection was closed"


def code_of_path(address: str, path: bytes, metadata: tuple[tuple[str, bytes], ...] = ()) -> grpc.StatusCode:
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(path)(b"", timeout=20)
        except grpc.RpcError as error:
            return error.code()  # type: ignore[no-any-return]
    return Code.OK


async def test_nobody_is_refused_before_a_message_has_come() -> None:
    """Their messages are still being sent, or are none: no method waits for them."""
    async with served() as at:
        for method in (TOKENIZE, STREAM, PUSH):
            never = at.channel.stream_stream(method)(metadata=())
            assert await asyncio.wait_for(status(never), 20) is Code.UNAUTHENTICATED
            assert await at.code(method, b"\xff" * 9, metadata=()) is Code.UNAUTHENTICATED
        assert await at.code(CHECK, b"", metadata=()) is Code.OK
    assert set(at.house.told) == {"Tokenize Nobody", "GenerateStream Nobody", "Push Nobody"}


@pytest.mark.parametrize(
    ("method", "messages", "code", "name"),
    [
        (TOKENIZE, [b"garbage"], Code.INVALID_ARGUMENT, "InvalidMessage"),
        (TOKENIZE, [b"\x12\x02\xff\xfe"], Code.INVALID_ARGUMENT, "InvalidMessage"),  # No UTF-8.
        (PUSH, [b"", b"garbage"], Code.INVALID_ARGUMENT, "InvalidMessage"),
        (CHECK, [b"garbage"], Code.INVALID_ARGUMENT, "InvalidMessage"),
        (TOKENIZE, [bytes(1001)], Code.INVALID_ARGUMENT, "MessageTooLarge"),
        (STREAM, [bytes(11)], Code.INVALID_ARGUMENT, "MessageTooLarge"),
        (PUSH, [b"", bytes(300_000)], Code.INVALID_ARGUMENT, "MessageTooLarge"),
        (TOKENIZE, [], Code.INVALID_ARGUMENT, "NotOneMessage"),
        (TOKENIZE, [b"", b""], Code.INVALID_ARGUMENT, "NotOneMessage"),
        (STREAM, [], Code.INVALID_ARGUMENT, "NotOneMessage"),
        (STREAM, [b"", b""], Code.INVALID_ARGUMENT, "NotOneMessage"),
        (CHECK, [], Code.INVALID_ARGUMENT, "NotOneMessage"),
        (CHECK, [b"", b"garbage"], Code.INVALID_ARGUMENT, "NotOneMessage"),
    ],
)
async def test_what_is_no_message_of_a_method_is_told_once_and_leaves_no_traceback(
    method: str, messages: list[bytes], code: grpc.StatusCode, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with served() as at:
        assert await at.code(method, *messages) is code
        assert await at.code(CHECK, b"") is Code.OK
    assert at.house.told == [f"{method.rpartition('/')[2]} {name}"]
    assert not caplog.records


async def test_a_message_that_does_not_end_gives_its_turn_back() -> None:
    limits = Limits(at_once=2, message_s=0.05)
    async with served(limits) as at:
        silent = [at.channel.stream_stream(TOKENIZE)(metadata=ME) for _ in range(5)]
        assert {await status(each) for each in silent} <= {Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED}
        assert await at.code(TOKENIZE, b"") is Code.OK


async def test_a_call_begins_when_its_client_has_said_all() -> None:
    """Before that another message may come; who never says so is as slow as who sends no message."""
    async with served(Limits(message_s=0.05)) as at:
        for method in (TOKENIZE, STREAM, CHECK):
            call = at.channel.stream_stream(method)(metadata=ME)
            await call.write(b"")
            assert await status(call) is Code.DEADLINE_EXCEEDED
        assert not at.inference.frames


async def test_who_sends_slowly_to_an_open_service_keeps_nobody_out() -> None:
    async with served(Limits(open_at_once=2, message_s=600)) as at:
        silent = [at.channel.stream_stream(CHECK)() for _ in range(5)]
        assert [await at.code(CHECK, b"", metadata=()) for _ in range(5)] == [Code.OK] * 5
        for call in silent:
            call.cancel()


async def test_open_calls_whose_answers_nobody_reads_are_few_of_one_address() -> None:
    """gRPC keeps them for as long as their connection stays: nothing here can end them."""
    async with served(Limits(open_calls=3)) as at:
        connection = await asyncio.to_thread(http2.Connection, at.address, reads=False)
        async with asyncio.timeout(20):
            while (code := await at.code(CHECK, b"", metadata=())) is Code.OK:
                stream, head = connection.call(CHECK)
                connection.send([head, http2.message(stream, b"")])
                await asyncio.sleep(0.01)
            assert code is Code.RESOURCE_EXHAUSTED
            connection.close()
            while await at.code(CHECK, b"", metadata=()) is not Code.OK:
                await asyncio.sleep(0.01)


async def test_an_address_may_make_so_many_calls_whoever_it_says_it_is() -> None:
    async with served(rates=PeerRates(1.0, clock=lambda: 0.0)) as at:
        codes = [await at.code(TOKENIZE, b"", metadata=metadata) for metadata in (ME, (), ME)]
        assert codes == [Code.OK, Code.UNAUTHENTICATED, Code.RESOURCE_EXHAUSTED]


async def test_a_call_that_comes_again_is_known_by_its_request_id() -> None:
    now = 0.0
    async with served(rates=PeerRates(1.0, clock=lambda: now)) as at:
        named = (*ME, (REQUEST_ID, "mine"))
        codes = [await at.code(TOKENIZE, b"", metadata=metadata) for metadata in (ME, ME, named)]
        assert codes == [Code.OK, Code.OK, Code.RESOURCE_EXHAUSTED]
        now = 1.0
        codes = [await at.code(TOKENIZE, b"", metadata=metadata) for metadata in (ME, ME, named)]
        assert codes == [Code.OK, Code.RESOURCE_EXHAUSTED, Code.OK]


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
async def test_a_call_that_was_refused_leaves_its_request_to_nobody() -> None:
    """gRPC keeps the error of an aborted call, and that all that was in its frames."""
    async with served() as at:
        request = inference_pb2.TokenizeRequest(text="fail").SerializeToString()
        assert await at.code(TOKENIZE, request) is Code.FAILED_PRECONDITION
        for _ in range(100):
            if at.inference.frames[0]() is None:
                break
            await asyncio.sleep(0.01)
        assert at.inference.frames[0]() is None
