"""The two transports, plain and asyncio: operations go out on a channel, typed errors come back."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio

from lorafleet.doors.options import more_connections
from lorafleet.errors import Cancelled, LoraFleetError, Unavailable, from_call, invalid
from lorafleet.keepalive import keepalive
from lorafleet.operations import Operation, Page
from lorafleet.requests import MAX_MESSAGE_BYTES
from lorafleet.tls.credentials import channel_credentials
from lorafleet.tls.files import Tls, TlsError
from lorafleet.tls.trouble import Settings, describe, find_trouble, may_be_trouble

T = TypeVar("T")

# Pings find a dead peer during a silent call (a long prefill sends nothing); the servers allow one every
# 10 s. A restarted server is found again within max_reconnect_backoff. gRPC's min_reconnect_backoff is left
# alone: it is the time that a connection may take, and a server may be busy, or far away. What a caller does
# not read stays within 64 KiB a stream, since no probe widens its window: the server sees then who is deaf.
# A server takes so many streams on one connection; the channel opens more when it needs them.
CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    *keepalive(30.0, 10.0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    *more_connections(32),
)


TlsSettings: TypeAlias = Tls | grpc.ChannelCredentials | None
_NAMES = Settings(use="tls=Tls()", ca="Tls(ca=...)", cert="Tls(cert=..., key=...)", off="leave tls out")


class Calls:
    """A channel with the caller's identity. timeout: seconds for a call that names none."""

    def __init__(self, target: str, token: str | None, tls: TlsSettings, timeout: float | None) -> None:
        self.timeout = timeout
        self._closed = False
        self._tls = tls
        self._metadata = _metadata(token)
        self._channel = (
            grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
            if tls is None
            else grpc.secure_channel(target, _credentials(tls), options=CHANNEL_OPTIONS)
        )

    def close(self) -> None:
        self._closed = True
        self._channel.close()

    @property
    def _open(self) -> grpc.Channel:
        """Raises Cancelled once it is closed."""
        if self._closed:
            raise _closed()
        return self._channel

    def _error(self, error: grpc.RpcError) -> LoraFleetError:
        return _with_trouble(from_call(error), self._tls)

    def unary(self, operation: Operation[T]) -> T:
        method = self._open.unary_unary(operation.path, *_codecs(operation))
        try:
            response = method(operation.request, timeout=self.timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._error(error) from error
        return operation.result(response)

    def upload(self, operation: Operation[T], messages: Iterator[Any]) -> T:
        """`messages` go before the response; an error of theirs cancels the call and is raised."""
        method = self._open.stream_unary(operation.path, *_codecs(operation))
        source = _Source(messages)
        try:
            response = method(source, timeout=self.timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise source.error or self._error(error) from error
        return operation.result(response)

    def stream(self, operation: Operation[T], timeout: float | None) -> Generator[T, None, None]:
        """Closing it cancels the call."""
        method = self._open.unary_stream(operation.path, *_codecs(operation))
        metadata = (*self._metadata, *operation.metadata)
        call = method(operation.request, timeout=timeout, metadata=metadata)
        try:
            for response in call:
                yield operation.result(response)
        except grpc.RpcError as error:
            raise self._error(error) from error
        finally:
            call.cancel()

    def pages(self, listing: Callable[[str], Operation[Page[T]]]) -> list[T]:
        """All items; `listing` makes the operation for a page token."""
        items: list[T] = []
        token = ""
        while True:
            page = self.unary(listing(token))
            items += page.items
            token = page.next_token
            if not token:
                return items

    def each(self, listing: Callable[[str], Operation[Page[T]]]) -> Generator[T, None, None]:
        """The same as pages, one item after the other: the next page is on its way while one is used."""
        operation = listing("")
        method = self._open.unary_unary(operation.path, *_codecs(operation))
        call = method.future(operation.request, timeout=self.timeout, metadata=self._metadata)
        try:
            while True:
                page = operation.result(call.result())
                if page.next_token:
                    request = listing(page.next_token).request
                    call = method.future(request, timeout=self.timeout, metadata=self._metadata)
                yield from page.items
                if not page.next_token:
                    return
        except grpc.RpcError as error:
            raise self._error(error) from error
        finally:
            call.cancel()


class AsyncCalls:
    """The same for asyncio; to be made inside a running event loop."""

    def __init__(self, target: str, token: str | None, tls: TlsSettings, timeout: float | None) -> None:
        self.timeout = timeout
        self._closed = False
        self._tls = tls
        self._metadata = _metadata(token)
        self._channel = (
            grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(target, _credentials(tls), options=CHANNEL_OPTIONS)
        )

    async def close(self) -> None:
        self._closed = True
        await self._channel.close()

    @property
    def _open(self) -> grpc.aio.Channel:
        """Raises Cancelled once it is closed."""
        if self._closed:
            raise _closed()
        return self._channel

    async def unary(self, operation: Operation[T]) -> T:
        method = self._open.unary_unary(operation.path, *_codecs(operation))
        async with _typed_errors(self._tls):
            response = await method(operation.request, timeout=self.timeout, metadata=self._metadata)
        return operation.result(response)

    async def upload(self, operation: Operation[T], messages: Iterator[Any]) -> T:
        """`messages` are made on a thread, as they read files; an error of theirs cancels the call."""
        method = self._open.stream_unary(operation.path, *_codecs(operation))
        source = _Source(messages)
        call = method(_on_thread(source), timeout=self.timeout, metadata=self._metadata)
        try:
            async with _typed_errors(self._tls):
                response = await call
        except (LoraFleetError, asyncio.CancelledError) as error:
            if source.error is not None:  # grpc.aio cancels the call when its request iterator raises
                raise source.error from error
            call.cancel()
            raise
        return operation.result(response)

    async def stream(self, operation: Operation[T], timeout: float | None) -> AsyncGenerator[T, None]:
        """Closing it cancels the call."""
        method = self._open.unary_stream(operation.path, *_codecs(operation))
        metadata = (*self._metadata, *operation.metadata)
        call = method(operation.request, timeout=timeout, metadata=metadata)
        try:
            async with _typed_errors(self._tls):
                async for response in call:
                    yield operation.result(response)
        finally:
            call.cancel()

    async def pages(self, listing: Callable[[str], Operation[Page[T]]]) -> list[T]:
        """All items; `listing` makes the operation for a page token."""
        items: list[T] = []
        token = ""
        while True:
            page = await self.unary(listing(token))
            items += page.items
            token = page.next_token
            if not token:
                return items

    async def each(self, listing: Callable[[str], Operation[Page[T]]]) -> AsyncGenerator[T, None]:
        """The same as pages, one item after the other."""
        token = ""
        while True:
            page = await self.unary(listing(token))
            for item in page.items:
                yield item
            token = page.next_token
            if not token:
                return


@asynccontextmanager
async def _typed_errors(tls: TlsSettings) -> AsyncIterator[None]:
    """Types the errors of calls of grpc.aio. When the channel is closed it ends them as if their tasks had
    been cancelled."""
    try:
        yield
    except grpc.RpcError as error:
        typed = from_call(error)
        if may_be_trouble(typed.message):
            typed = await asyncio.to_thread(_with_trouble, typed, tls)
        raise typed from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise _closed() from error


def _with_trouble(error: LoraFleetError, tls: TlsSettings) -> LoraFleetError:
    """The same error. When TLS is why no connection came about, it says so; its metadata name the trouble."""
    if isinstance(error, Unavailable) and (trouble := find_trouble(error.message, tls)):
        error.args = (f"{describe(trouble, _NAMES)} ({error.message})",)
        error.message = str(error)
        error.metadata["tls"] = trouble.value
    return error


def _credentials(tls: Tls | grpc.ChannelCredentials) -> grpc.ChannelCredentials:
    """Raises InvalidRequest for files that cannot be used."""
    if isinstance(tls, grpc.ChannelCredentials):
        return tls
    try:
        return channel_credentials(tls)
    except TlsError as error:
        raise invalid("tls", str(error)) from error


def _closed() -> Cancelled:
    return Cancelled(grpc.StatusCode.CANCELLED, "the client was closed", reason="CLIENT_CLOSED")


class _Source:
    """An iterator that remembers what it raised: gRPC itself only tells that the call was cancelled."""

    def __init__(self, messages: Iterator[Any]) -> None:
        self._messages = messages
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._messages)
        except StopIteration:
            raise
        except Exception as error:
            self.error = error
            raise


async def _on_thread(messages: Iterator[Any]) -> AsyncIterator[Any]:
    while (message := await asyncio.to_thread(next, messages, None)) is not None:
        yield message


def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Raises InvalidRequest for a token that no header can carry."""
    if token and not (token.isascii() and token.isprintable()):
        raise invalid("token", "holds what no header can carry: a line's end, or a letter beyond ASCII")
    return (("authorization", f"Bearer {token}"),) if token else ()


def _codecs(operation: Operation[Any]) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    """Request serializer and response deserializer, in the order in which a channel takes them."""
    return type(operation.request).SerializeToString, operation.response.FromString
