"""How an error of ours ends a call: gRPC status, and google.rpc details for machines."""

import asyncio
import contextlib
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NoReturn, TypeVar, cast

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from lorafleet.doors import message_is_done
from lorafleet.doors.errors import let_go
from scheduler import audit
from scheduler.errors import SchedulerError, Violation, from_exception

logger = logging.getLogger(__name__)

ERROR_DOMAIN = "lorafleet"
# A status travels in HTTP/2 headers, of which gRPC peers accept 8 KiB: the message percent-encoded (3 bytes
# for one), and once more in the details, in base64. So long texts are cut.
MAX_MESSAGE_BYTES = 800
MAX_FIELD_BYTES = 200
# All violations together: how many there may be, and the bytes of their fields and descriptions.
MAX_VIOLATIONS = 16
MAX_VIOLATIONS_BYTES = 2400

Handler = TypeVar("Handler", bound=Callable[..., Any])


async def abort(context: grpc.aio.ServicerContext, error: SchedulerError) -> NoReturn:
    """Ends the call with the error's status and its google.rpc details. The audit log has it, where it is a
    refusal or a change that failed."""
    audit.ended(context, error)
    status = rpc_status.to_status(_status(error))
    trailing = (*(context.trailing_metadata() or ()), *status.trailing_metadata)
    await context.abort(status.code, status.details, trailing)
    raise AssertionError("context.abort returned")  # It never does; grpc is untyped and cannot say so.


def _status(error: SchedulerError) -> status_pb2.Status:
    status = status_pb2.Status(code=error.code.value[0], message=_cut(error.message, MAX_MESSAGE_BYTES))
    metadata = {key: _cut(value, MAX_FIELD_BYTES) for key, value in error.metadata.items()}
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=metadata)
    )
    if error.violations:
        status.details.add().Pack(_bad_request(error.violations[:MAX_VIOLATIONS]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def _bad_request(violations: Sequence[Violation]) -> error_details_pb2.BadRequest:
    max_bytes = min(MAX_FIELD_BYTES, MAX_VIOLATIONS_BYTES // (2 * len(violations)))
    return error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(
                field=_cut(each.field, max_bytes),
                description=_cut(each.description, max_bytes),
                reason=each.reason,
            )
            for each in violations
        ]
    )


def _cut(text: str, max_bytes: int) -> str:
    return text.encode(errors="replace")[:max_bytes].decode(errors="ignore")


def translate_errors(handler: Handler) -> Handler:
    """Wraps a servicer's method, unary or streaming: what it raises ends the call with the right status.

    Cancellation and a status that the handler has already set pass through. A call that has ended by itself,
    at its deadline or since its client went, ends as if it had been cancelled. The request, which may be
    large, is not kept while the status is sent.
    """
    if inspect.isasyncgenfunction(handler):

        @functools.wraps(handler)
        async def stream(
            self: object, request: object, context: grpc.aio.ServicerContext
        ) -> AsyncIterator[object]:
            answering = handler(self, request, context)
            del request
            try:
                async with contextlib.aclosing(answering) as messages:
                    async for message in messages:
                        yield message
            except Exception as error:
                await _end(context, error)

        return cast(Handler, stream)

    @functools.wraps(handler)
    async def unary(self: object, request: object, context: grpc.aio.ServicerContext) -> object:
        answering = handler(self, request, context)
        del request
        try:
            return await answering
        except Exception as error:
            await _end(context, error)

    return cast(Handler, unary)


async def _end(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    try:
        if not isinstance(error, grpc.aio.InternalError):
            told = from_exception(error)
            let_go(error)
            message_is_done()
            await abort(context, told)
    except grpc.aio.InternalError:
        logger.debug("a call ended before its status could be told", exc_info=True)
    raise asyncio.CancelledError from error
