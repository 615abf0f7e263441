"""Errors as a client receives them, through a real server."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

import adapter_store
from lorafleet.doors.refusals import InvalidMessage
from lorafleet.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from scheduler import errors
from scheduler.rpc_errors import translate_errors


class Raising(inference_pb2_grpc.InferenceServicer):
    """Raises what it was made with: at once in a unary call, after one chunk in a stream."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    @translate_errors
    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GenerateResponse:
        raise self._error

    @translate_errors
    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateChunk]:
        yield inference_pb2.GenerateChunk(text="first")
        raise self._error


@contextlib.asynccontextmanager
async def calling(error: BaseException) -> AsyncIterator[Any]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Raising(error), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield inference_pb2_grpc.InferenceStub(channel)
    await server.stop(None)


async def status_of(error: BaseException) -> status_pb2.Status:
    async with calling(error) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.Generate(inference_pb2.GenerateRequest())
        chunks = stub.GenerateStream(inference_pb2.GenerateRequest())
        assert (await chunks.read()).text == "first"
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            await chunks.read()
    assert unary.value.code() == streamed.value.code()
    details = dict(unary.value.trailing_metadata())["grpc-status-details-bin"]
    # Clients need no googleapis: our own messages read the same bytes.
    ours = common_pb2.ErrorStatus.FromString(details)
    assert ours.code == unary.value.code().value[0]
    status = status_pb2.Status.FromString(details)
    assert status.code == ours.code
    assert status.message == unary.value.details()
    return status


def detail(status: status_pb2.Status, kind: type[Any]) -> Any:
    for packed in status.details:
        if packed.Is(kind.DESCRIPTOR):
            message = kind()
            packed.Unpack(message)
            return message
    return None


ALL: list[tuple[Callable[[], Exception], grpc.StatusCode, str]] = [
    (lambda: errors.InvalidRequest("a.b", "bad"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    (
        lambda: errors.WarningsRefused(adapter_store.WarningsRefused((("NO_EFFECT", "zeros"),))),
        grpc.StatusCode.INVALID_ARGUMENT,
        "WARNINGS_REFUSED",
    ),
    (lambda: errors.Unauthenticated("who?"), grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
    (lambda: errors.AtTheDoor(InvalidMessage("x")), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE"),
    (lambda: errors.PermissionDenied("no"), grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"),
    (lambda: errors.AdapterNotFound("a/b"), grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND"),
    (lambda: errors.IncompatibleAdapter("x"), grpc.StatusCode.FAILED_PRECONDITION, "INCOMPATIBLE_ADAPTER"),
    (lambda: errors.NoConstraints("x"), grpc.StatusCode.UNIMPLEMENTED, "CONSTRAINTS_UNSUPPORTED"),
    (lambda: errors.InUse("x"), grpc.StatusCode.FAILED_PRECONDITION, "IN_USE"),
    (lambda: errors.AdapterRemoved("a/b", "x"), grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_REMOVED"),
    (lambda: errors.TenantFull("no more"), grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_FULL"),
    (
        lambda: errors.RateExceeded("acme", "REQUEST_RATE", 2.0),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "REQUEST_RATE",
    ),
    (
        lambda: errors.TooMuchHeld("TOO_MANY_WATCHES", "x", retry_after_s=1.5),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "TOO_MANY_WATCHES",
    ),
    (lambda: errors.SlowTransfer("x"), grpc.StatusCode.DEADLINE_EXCEEDED, "SLOW_TRANSFER"),
    (lambda: errors.TooManyStreams("acme", 3, 1.5), grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS"),
    (lambda: errors.PushedAgain("a/b", "x"), grpc.StatusCode.ABORTED, "PUSHED_AGAIN"),
    (lambda: errors.GenerationMismatch("x"), grpc.StatusCode.ABORTED, "GENERATION_MISMATCH"),
    (lambda: errors.Superseded("r1"), grpc.StatusCode.ABORTED, "SUPERSEDED"),
    (lambda: errors.QueueFull("x", retry_after_s=1.5), grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    (lambda: errors.NoExecutor("x"), grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR"),
    (lambda: errors.StoreUnavailable("x"), grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE"),
    (lambda: errors.Draining(), grpc.StatusCode.UNAVAILABLE, "DRAINING"),
    (lambda: errors.LedgerUnavailable(), grpc.StatusCode.UNAVAILABLE, "LEDGER_UNAVAILABLE"),
    (lambda: errors.DeadlineExceeded("x"), grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    (
        lambda: errors.DeadlineUnreachable(9.0, 2.0, 7.0),
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "DEADLINE_UNREACHABLE",
    ),
    (lambda: errors.QueueTooLong(9.0, 2.0, 7.0), grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_TOO_LONG"),
    (lambda: errors.SlowClient("x"), grpc.StatusCode.CANCELLED, "SLOW_CLIENT"),
    (lambda: errors.DataLoss("x"), grpc.StatusCode.DATA_LOSS, "DATA_LOSS"),
    (
        lambda: errors.ExecutorFailed(grpc.StatusCode.FAILED_PRECONDITION, "RANK", "x"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "RANK",
    ),
    (lambda: adapter_store.AdapterNotFound("x"), grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND"),
    (lambda: adapter_store.InvalidRef("x"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    (lambda: adapter_store.InvalidAdapter("x"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    (
        lambda: adapter_store.WarningsRefused((("NO_EFFECT", "zeros"),)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "WARNINGS_REFUSED",
    ),
    (
        lambda: adapter_store.IncompatibleAdapter("x"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "INCOMPATIBLE_ADAPTER",
    ),
    (lambda: adapter_store.InUse("x"), grpc.StatusCode.FAILED_PRECONDITION, "IN_USE"),
    (lambda: adapter_store.GenerationMismatch("x"), grpc.StatusCode.ABORTED, "GENERATION_MISMATCH"),
    (lambda: adapter_store.DataLoss("x"), grpc.StatusCode.DATA_LOSS, "DATA_LOSS"),
    (lambda: adapter_store.StoreUnavailable("x"), grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE"),
    (lambda: adapter_store.UnsafeStore("x"), grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE"),
    (lambda: adapter_store.UploadLost("x"), grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE"),
]


@pytest.mark.parametrize(("make", "code", "reason"), ALL)
async def test_code_reason_and_details(
    make: Callable[[], Exception], code: grpc.StatusCode, reason: str
) -> None:
    status = await status_of(make())
    assert status.code == code.value[0]
    info = detail(status, error_details_pb2.ErrorInfo)
    assert (info.domain, info.reason) == ("lorafleet", reason)
    retryable = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
    retryable |= reason == "DEADLINE_UNREACHABLE"
    assert (detail(status, error_details_pb2.RetryInfo) is not None) == retryable


def test_the_table_above_is_complete() -> None:
    """Every leaf of both trees that a client can meet is provoked here."""

    def leaves(kind: type[Exception]) -> set[str]:
        below = kind.__subclasses__()
        return {kind.__name__}.union(*map(leaves, below)) if below else {kind.__name__}

    provoked = {type(make()).__name__ for make, _, _ in ALL}
    internal = {"SchedulerError", "RetryableError", "ExecutorFailed", "InternalError"}
    assert leaves(errors.SchedulerError) - internal <= provoked
    at_start = {"AdapterStoreError", "InvalidModel", "NoStore", "OtherFormat"}
    assert leaves(adapter_store.AdapterStoreError) - at_start <= provoked


async def test_violations_and_retry_delay_arrive() -> None:
    bad = detail(await status_of(errors.InvalidRequest("sampling.top_p", "2")), error_details_pb2.BadRequest)
    assert [(v.field, v.description) for v in bad.field_violations] == [("sampling.top_p", "2")]
    retry = detail(await status_of(errors.QueueFull("x", retry_after_s=2.5)), error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 2500


async def test_a_bug_tells_the_client_an_id_and_the_log_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        status = await status_of(KeyError("/secret/path"))
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert "secret" not in str(status)
    ids = [record.args[0] for record in caplog.records if record.args and record.exc_info]
    assert detail(status, error_details_pb2.ErrorInfo).metadata["error_id"] in ids


async def test_long_texts_and_odd_names_still_arrive() -> None:
    status = await status_of(errors.InvalidRequest("字" * 5000, "\n\"'é" * 5000))
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert status.message.startswith("字字")


async def test_a_refusal_of_many_warnings_names_the_reason_of_each() -> None:
    reasons = [f"{'LONG_REASON_' * 2}{number}" for number in range(16)]
    refused = adapter_store.WarningsRefused(tuple((reason, "字" * 500) for reason in reasons))
    bad = detail(await status_of(refused), error_details_pb2.BadRequest)
    assert [(each.field, each.reason) for each in bad.field_violations] == [
        ("adapter", reason) for reason in reasons
    ]
    assert all(each.description.startswith("字字") for each in bad.field_violations)


async def test_a_deadline_that_passes_on_both_sides_at_once_is_no_bug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Some calls have ended when their handler's status is sent: nobody is there to be told."""

    class Late(inference_pb2_grpc.InferenceServicer):
        @translate_errors
        async def GenerateStream(
            self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
        ) -> None:
            await asyncio.sleep(context.time_remaining())
            raise errors.DeadlineExceeded("the deadline passed")

    async def code(number: int) -> grpc.StatusCode:
        call = stub.GenerateStream(inference_pb2.GenerateRequest(), timeout=0.05 + number * 0.0005)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        return caught.value.code()

    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Late(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for _ in range(10):
            codes = await asyncio.gather(*map(code, range(50)))
            assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}
    await server.stop(None)
    # gRPC's poller still wakes the loops of tests before, which are closed: asyncio tells of that, too.
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not [message for message in told if "PollerCompletionQueue" not in message]


async def test_a_status_that_the_handler_set_passes_through() -> None:
    class Aborting(inference_pb2_grpc.InferenceServicer):
        @translate_errors
        async def Generate(
            self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
        ) -> inference_pb2.GenerateResponse:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "mine")
            raise AssertionError("unreachable")

    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Aborting(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest())
    await server.stop(None)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.OUT_OF_RANGE, "mine")
