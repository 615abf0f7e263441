"""Who a call is comes first: no byte of a body is read before that.

gRPC reads and parses the message of a method with one request before its handler runs. So every method is
served as one with a stream of requests, of bytes: such a handler reads when it asks. Until then, a body waits
in the window that HTTP/2 has for it, and is dropped with the call.
"""

import asyncio
import inspect
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar, cast

import grpc

from lorafleet.doors.bodies import Bodies, Body
from lorafleet.doors.errors import let_go
from lorafleet.doors.held import Held
from lorafleet.doors.peers import PeerRates, host
from lorafleet.doors.refusals import (
    InvalidMessage,
    MessageTooLarge,
    NotOneMessage,
    Refused,
    SlowMessage,
    TooManyCalls,
)
from lorafleet.doors.turns import ShortTurns, Turns
from lorafleet.errors import REQUEST_ID

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MOST_KEY = 128  # Characters, as of a request_id.
HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"


class House(Protocol):
    """What a service says about its callers."""

    def who(self, context: grpc.aio.ServicerContext) -> str:
        """A name for who makes a call: callers with the same one share what each may have. What it raises
        ends the call."""

    def refused(self, context: grpc.aio.ServicerContext, method: str, error: Exception) -> None:
        """A call came no further than the door, for what `who` raised or for Refused: to log and count it."""

    async def abort(self, context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
        """Ends such a call."""


@dataclass(frozen=True)
class Limits:
    """Bytes of one message, and how many are read at once.

    message_bytes  by service or by "service/method", beside `other_bytes` for all methods that are not named
    at_once        messages on their way, of all callers who say who they are
    open_at_once   the same of those who need not
    open_calls     of those, and of one address, whose messages have come: an answer that is not read keeps
                   its call in memory for as long as the connection stays
    body_bytes     of large messages that have come, for as long as calls work on them
    streams        streams of requests to one method: of the next message of each, all may be on its way
    message_s      seconds in which a message has to come whole, once it is asked for
    """

    message_bytes: Mapping[str, int] = field(default_factory=dict)
    other_bytes: int = 256 * 1024
    at_once: int = 8
    open_at_once: int = 2
    open_calls: int = 128
    body_bytes: int = 32 << 20
    streams: int = 32
    message_s: float = 20.0

    def of(self, method: str) -> int:
        """`method` as on the wire, "/service/method"."""
        name = method.removeprefix("/")
        found = self.message_bytes.get(name, self.message_bytes.get(name.partition("/")[0]))
        return self.other_bytes if found is None else found


class Door:
    """`open_services` are for everyone: their callers are told apart by address alone."""

    def __init__(
        self,
        house: House,
        limits: Limits,
        rates: PeerRates | None = None,
        open_services: frozenset[str] = frozenset({HEALTH}),
        body_share: Callable[[str], int] | None = None,
    ) -> None:
        """`body_share`: bytes of large messages that a caller may have worked on, half by default."""
        self._house = house
        self._limits = limits
        self._rates = rates or PeerRates(0)
        self._open = open_services
        self._turns = Turns(limits.at_once)
        self._short_turns = ShortTurns(limits.open_at_once)
        what, share = "calls that do not end, or whose answers are not read,", limits.open_calls
        self._open_calls = Held(what, math.inf, TooManyCalls, lambda address: share)  # By address.
        self._bodies = Bodies(limits.body_bytes, body_share)

    def wrap(self, method: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler | None:
        """The method behind this door. `method` as on the wire, "/service/method". None for one that is no
        coroutine, as generated servicers have those that nobody wrote."""
        guarded = _Guarded(self, method, handler)
        if not guarded.is_written:
            return None
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                guarded.stream, response_serializer=handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(
            guarded.unary, response_serializer=handler.response_serializer
        )

    def is_open(self, method: str) -> bool:
        return method[1:].partition("/")[0] in self._open

    def limit(self, method: str) -> int:
        return self._limits.of(method)

    def body(self) -> Body:
        """That of a call which begins."""
        return Body(self._bodies)

    def stream_turns(self) -> Turns:
        return Turns(self._limits.streams)

    def check_rate(self, context: grpc.aio.ServicerContext) -> None:
        """Raises TooManyCalls."""
        if self._rates:
            self._rates.take(host(context.peer()), key_of(context))

    def who(self, context: grpc.aio.ServicerContext) -> str:
        """Raises what the house does."""
        return self._house.who(context)

    async def read(self, context: grpc.aio.ServicerContext, caller: str) -> bytes:
        """The one message of a call, which may be large or slow: it takes a turn. Raises Refused."""
        await self._turns.take(caller, key_of(context))
        try:
            async with asyncio.timeout(self._limits.message_s):
                return await _only_message(context)
        except TimeoutError:
            raise SlowMessage(f"the message did not come within {self._limits.message_s:g} s") from None
        finally:
            self._turns.give_back(caller)

    async def read_openly(self, context: grpc.aio.ServicerContext) -> bytes:
        """The same from someone who need not say who they are. Raises Refused."""
        address = host(context.peer())
        if not self._open_calls.lets_in(address):
            raise self._open_calls.refused(address)
        try:
            async with asyncio.timeout(self._limits.message_s) as reading:
                try:
                    await self._short_turns.begin(address, reading)
                    message = await _only_message(context)
                finally:
                    self._short_turns.end(reading)
        except TimeoutError:
            raise SlowMessage("the message did not come in time, or gave way to others") from None
        self._open_calls.take(address)
        context.add_done_callback(lambda _: self._open_calls.give_back(address))
        return message

    def tell(self, context: grpc.aio.ServicerContext, method: str, error: Exception) -> None:
        self._house.refused(context, method, error)

    async def abort(self, context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
        """A call that has ended by itself meanwhile ends as if it had been cancelled."""
        try:
            await self._house.abort(context, error)
        except grpc.aio.InternalError:
            logger.debug("a call ended before its status could be told", exc_info=True)
            raise asyncio.CancelledError from error


def key_of(context: grpc.aio.ServicerContext) -> str:
    """The key by which a call is known that comes again, "" where it does not say."""
    return str(dict(context.invocation_metadata() or ()).get(REQUEST_ID, ""))[:_MOST_KEY]


async def _only_message(context: grpc.aio.ServicerContext) -> bytes:
    """Whose end the client tells right after it. Raises NotOneMessage."""
    message = await context.read()
    if message is grpc.aio.EOF:
        raise NotOneMessage("this method takes one message, and none came")
    if await context.read() is not grpc.aio.EOF:
        raise NotOneMessage("this method takes one message, and more came")
    return cast(bytes, message)


class _Guarded:
    """One method: what gRPC calls in place of its handler."""

    def __init__(self, door: Door, method: str, handler: grpc.RpcMethodHandler) -> None:
        self._door = door
        self._method = method
        self._is_open = door.is_open(method) and not handler.request_streaming
        self._limit = door.limit(method)
        self._parse: Callable[[bytes], Any] = handler.request_deserializer
        self._turns = door.stream_turns() if handler.request_streaming else None
        self._behavior = (
            handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        )
        self._yields = inspect.isasyncgenfunction(self._behavior)
        self.is_written = self._yields or inspect.iscoroutinefunction(self._behavior)

    async def unary(self, _: object, context: grpc.aio.ServicerContext) -> object:
        return await self._call(context, self._behavior)

    async def stream(self, _: object, context: grpc.aio.ServicerContext) -> None:
        await self._call(context, self._write_all if self._yields else self._behavior)

    async def _write_all(self, request: object, context: grpc.aio.ServicerContext) -> None:
        async with aclosing(self._behavior(request, context)) as messages:
            async for message in messages:
                await context.write(message)

    async def _call(
        self,
        context: grpc.aio.ServicerContext,
        behavior: Callable[[Any, grpc.aio.ServicerContext], Awaitable[object]],
    ) -> object:
        try:
            return await self._through(context, behavior)
        except grpc.aio.AbortError as error:
            let_go(error)
            raise error.with_traceback(None) from None

    async def _through(
        self,
        context: grpc.aio.ServicerContext,
        behavior: Callable[[Any, grpc.aio.ServicerContext], Awaitable[object]],
    ) -> object:
        if self._turns is None:
            body = self._door.body()
            try:
                # Who answers has the message alone, and may drop it early.
                return await behavior(await self._begin(context, partial(self._request, body)), context)
            finally:
                body.is_done()
        caller = await self._begin(context, partial(self._turn, self._turns))
        try:
            return await behavior(self._messages(context), context)
        except Refused as error:
            let_go(error)
            await self._door.abort(context, error)
        finally:
            self._turns.give_back(caller)

    async def _begin(
        self, context: grpc.aio.ServicerContext, first: Callable[[grpc.aio.ServicerContext], Awaitable[T]]
    ) -> T:
        try:
            self._door.check_rate(context)
            return await first(context)
        except Exception as error:
            self._door.tell(context, self._method, error)
            let_go(error)
            await self._door.abort(context, error)

    async def _request(self, body: Body, context: grpc.aio.ServicerContext) -> Any:
        door = self._door
        if self._is_open:
            return self._message(await door.read_openly(context))
        caller = door.who(context)
        raw = await door.read(context, caller)
        return await body.parsed(caller, raw, self._message, key_of(context))

    async def _turn(self, turns: Turns, context: grpc.aio.ServicerContext) -> str:
        """Whose it is."""
        caller = self._door.who(context)
        await turns.take(caller, key_of(context))
        return caller

    async def _messages(self, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        while (raw := await context.read()) is not grpc.aio.EOF:
            try:
                message = self._message(raw)
            except Refused as error:
                self._door.tell(context, self._method, error)
                raise
            yield message

    def _message(self, raw: bytes) -> Any:
        if len(raw) > self._limit:
            raise MessageTooLarge(
                f"the message has {len(raw)} bytes, and this method takes at most {self._limit}"
            )
        try:
            return self._parse(raw)
        except Exception:  # Each library has its own.
            raise InvalidMessage("the bytes are no message that this method takes") from None
