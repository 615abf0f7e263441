"""The connection to one executor: keeps an Execute stream open, keeps its state, passes its events on."""

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, cast

import grpc

from lorafleet.tls.files import WatchedFiles
from lorafleet.v1 import adapters_pb2, executor_pb2, executor_pb2_grpc
from scheduler.fleet.endpoint import Endpoint
from scheduler.fleet.executor_channel import explained, open_channel
from scheduler.fleet.memory import Kept
from scheduler.fleet.residency import Residency, Tier
from scheduler.fleet.state import ExecutorState, Phase
from scheduler.fleet.wire import Tokens, copies_of, limits_of, report_of, split_batches, tokens_of

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
ENDS_WITH_STEPS = (("lorafleet-ends-with-steps", "true"),)  # StepTokens.finished
MAX_BATCH_BYTES = 8 * 1024 * 1024  # Half of what a message may hold.
# Longer than a pause of this process counts on the clock `awake`, so that what came meanwhile is read first.
LAST_CHANCE_S = 0.25


class Listener(Protocol):
    """Told what executors say, by their names, on the event loop. Must not block and must not raise."""

    def on_tokens(self, name: str, step: Sequence[Tokens]) -> None:
        """All tokens of one step."""

    def on_finished(self, finished: executor_pb2.Finished) -> None: ...

    def on_rejected(self, name: str, rejected: executor_pb2.Rejected) -> None: ...

    def on_lost(self, name: str, dispatch_ids: list[str], why: str, *, crashed: bool) -> None:
        """The stream ended and these dispatches with it; `crashed` unless the executor had begun to drain."""

    def on_room(self) -> None:
        """A report came."""

    def on_phase(self) -> None:
        """The phase of an executor changed, or what it can hold."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Times in seconds; those that an executor has to be heard in count only while this loop is alive."""

    fingerprint: str  # Of our model; executors of another are refused.
    report_timeout_s: float = 3.0  # Three reports.
    step_timeout_s: float = 60.0  # A step that takes longer with work at hand is stuck.
    hello_timeout_s: float = 10.0
    min_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    tls: WatchedFiles | None = None  # Without them executors are reached in clear.


class StreamEnded(Exception):
    """Why a stream is over, and how its executor is to be seen until the next one."""

    def __init__(self, phase: Phase, detail: str) -> None:
        super().__init__(detail)
        self.phase = phase
        self.detail = detail


class ExecutorLink:
    """One executor. `state` and `kept` are for reading; commands go through the methods, in order.

    `awake` is a clock in seconds that runs only while this loop is alive. `kept` is what is remembered of an
    executor of this name.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        settings: LinkSettings,
        listener: Listener,
        awake: Callable[[], float],
        kept: Kept | None = None,
    ) -> None:
        self.state = ExecutorState(endpoint.address, name=endpoint.name)
        self.kept = kept or Kept()
        self.state.cordoned = self.kept.cordoned
        self._endpoint = endpoint
        self._next: Endpoint | None = None  # Where it has moved, while streams of the former place go on.
        self._call: grpc.aio.StreamStreamCall | None = None
        self._hurry = asyncio.Event()  # There is a reason to connect at once.
        self._settings = settings
        self._listener = listener
        self._awake = awake
        self._due = 0.0  # On that clock: when the next report, or the hello, must have come.
        self._cut: StreamEnded | None = None  # Why this side ends the stream.
        self._outgoing: asyncio.Queue[executor_pb2.ExecutorCommand] = asyncio.Queue()
        self._failures = 0
        self._drops = 0  # Sent, on all streams.

    async def run(self) -> NoReturn:
        """Keeps a stream open until cancelled."""
        while True:
            try:
                self._forget(await self._end_of_stream())
            except Exception:
                logger.exception("executor %s: bug while its stream's end was told", self.state.name)
            if not self._next:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), self._backoff())
            self._hurry.clear()
            self._move()

    def leave(self) -> None:
        """It gets nothing new. Its stream goes on."""
        self._next = None
        self.state.leaving = True

    def stay(self, endpoint: Endpoint) -> bool:
        """It is an executor of this fleet, at this place. One that has moved gets nothing new before what
        runs at the former place has ended: then `connect_anew`. False: nothing is new."""
        goes_to = None if endpoint == self._endpoint else endpoint
        if (goes_to, goes_to is not None) == (self._next, self.state.leaving):
            return False
        self._next = goes_to
        self.state.leaving = goes_to is not None
        return True

    @property
    def is_leaving(self) -> bool:
        return self.state.leaving and not self._next

    @property
    def has_moved(self) -> bool:
        return self._next is not None

    @property
    def has_own_name(self) -> bool:
        """Whether another executor can never be at its address under its name."""
        return bool(self._endpoint.pod)

    def connect_anew(self) -> None:
        """Ends the stream to the former place, where nothing runs any more."""
        self._hurry.set()
        if self._call and not self._cut:
            self._cut = StreamEnded(Phase.CONNECTING, "it has moved")
            self._call.cancel()  # Which the reader notices.

    def _move(self) -> None:
        if self._next:
            self._endpoint, self._next = self._next, None
            self.state.address, self.state.leaving = self._endpoint.address, False
            self._failures = 0

    def dispatch(self, dispatches: list[executor_pb2.Dispatch]) -> None:
        """Sends requests that `state` counts as sent already, in messages of bounded size."""
        for batch in split_batches(dispatches, MAX_BATCH_BYTES):
            command = executor_pb2.ExecutorCommand()
            command.dispatch.dispatches.extend(batch)
            self._send(command)

    def cancel(self, dispatch_id: str) -> None:
        """Ends a dispatch; nothing when it has ended already."""
        if self.state.ended(dispatch_id, time.monotonic()):
            cancel = executor_pb2.Cancel(dispatch_ids=[dispatch_id])
            self._send(executor_pb2.ExecutorCommand(cancel=cancel))

    def prefetch(self, digest: str, need_by_s: float, expected_uses: int) -> None:
        """`need_by_s`: from now, about."""
        need_by_ms = round(need_by_s * 1000)
        hint = executor_pb2.Prefetch(digest=digest, need_by_ms=need_by_ms, expected_uses=expected_uses)
        self._send(executor_pb2.ExecutorCommand(prefetch=hint))

    def tell_wait(self, digest: str, expected_uses: int, waiting_s: float, lasts_s: float) -> None:
        """`waiting_s`: for how long it has waited for want of a slot, 0 when that is over. The executor
        repeats it to all schedulers until it gets a dispatch of the version, or for `lasts_s`. To one that
        does not know of waits it is a hint, and nothing when it is over."""
        if self.state.limits and self.state.limits.knows_waits:
            wait = executor_pb2.Prefetch(
                digest=digest,
                expected_uses=expected_uses,
                waiting_ms=math.ceil(waiting_s * 1000),
                lasts_ms=math.ceil(lasts_s * 1000),
            )
            self._send(executor_pb2.ExecutorCommand(prefetch=wait))
        elif waiting_s:
            self.prefetch(digest, 0.0, expected_uses)

    def drop(self, digest: str, adapter: str) -> None:
        """Ends the adapter's pin ("": all pins), and frees the copies if no other pins them, as soon as
        nothing uses them. While there is no connection it only ends pins. Until the executor says that it is
        done, the drop is in `state.dropping`."""
        for pin in self.kept.ends(digest, adapter):
            self.unpin(*pin)
        if self.state.limits:
            self._drops += 1
            if self.state.limits.tells_drops:
                self.state.dropping[self._drops] = digest
            drop = executor_pb2.DropAdapter(digest=digest, adapter=adapter, number=self._drops)
            self._send(executor_pb2.ExecutorCommand(drop=drop))

    def pin(self, digest: str, adapter: str, tier: Tier) -> None:
        """Now, and again on every stream to come, until `unpin` or `drop`."""
        self.kept.pins[digest, adapter] = tier
        self.kept.unpinned.pop((digest, adapter), None)
        if self.state.limits:
            self._send_pin(digest, adapter, tier)

    def unpin(self, digest: str, adapter: str) -> None:
        """Now, or on the next stream if it was pinned here."""
        if self.state.limits:
            self.kept.pins.pop((digest, adapter), None)
            self._send_unpin(digest, adapter)
        else:
            self.kept.unpin((digest, adapter))

    def missing_pins(self) -> int:
        """Versions pinned here that the executor does not keep, by its own account: it is away, still loads
        them, or cannot. From any thread."""
        residency = self.state.residency
        return sum(not residency.keeps(digest) for digest in {digest for digest, _ in list(self.kept.pins)})

    def _send_pin(self, digest: str, adapter: str, tier: Tier) -> None:
        on_wire = cast(adapters_pb2.ResidencyTier, int(tier))
        pin = executor_pb2.PinAdapter(digest=digest, tier=on_wire, adapter=adapter)
        self._send(executor_pb2.ExecutorCommand(pin=pin))

    def _send_unpin(self, digest: str, adapter: str) -> None:
        unpin = executor_pb2.UnpinAdapter(digest=digest, adapter=adapter)
        self._send(executor_pb2.ExecutorCommand(unpin=unpin))

    def _send(self, command: executor_pb2.ExecutorCommand) -> None:
        self._outgoing.put_nowait(command)

    async def _end_of_stream(self) -> StreamEnded:
        try:
            await self._one_stream()
        except StreamEnded as end:
            return end
        except Exception:
            logger.exception("executor %s: bug in its link", self.state.name)
            return StreamEnded(Phase.CONNECTING, "internal error; the log has more")

    async def _one_stream(self) -> NoReturn:
        self._outgoing, self._cut = asyncio.Queue(), None
        self._due = self._awake() + self._settings.hello_timeout_s
        async with open_channel(self._endpoint, self._settings.tls) as channel:
            call = self._call = executor_pb2_grpc.ExecutorStub(channel).Execute(metadata=ENDS_WITH_STEPS)
            helpers = [
                asyncio.create_task(self._write(call, self._outgoing)),
                asyncio.create_task(self._cut_off_when_silent(call)),
            ]
            try:
                self._greet(await self._read(call))
                self._due = self._awake() + self._settings.report_timeout_s
                while True:
                    event = await self._read(call)
                    self._handle(event)
                    if event.HasField("load"):
                        self._due = self._awake() + self._settings.report_timeout_s
            finally:
                self._call = None
                for helper in helpers:
                    helper.cancel()
                call.cancel()

    async def _read(self, call: grpc.aio.StreamStreamCall) -> executor_pb2.ExecutorEvent:
        try:
            event = await call.read()
            if event is not grpc.aio.EOF:
                return cast(executor_pb2.ExecutorEvent, event)
            code, details = await call.code(), await call.details()
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details()
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            lost = StreamEnded(Phase.CONNECTING, "nothing can be written to it; the log has more")
            raise self._cut or lost from None
        told = await explained(details or "", self._settings.tls)
        raise StreamEnded(Phase.CONNECTING, f"stream ended: {code.name} {told}".rstrip())

    async def _cut_off_when_silent(self, call: grpc.aio.StreamStreamCall) -> None:
        while (left := self._due + LAST_CHANCE_S - self._awake()) > 0:
            await asyncio.sleep(min(left, self._settings.report_timeout_s))  # A hello brings `_due` closer.
        greeted = self.state.limits is not None
        phase, what = (Phase.HUNG, "report") if greeted else (Phase.CONNECTING, "hello")
        self._cut = StreamEnded(phase, f"no {what} within its time")
        call.cancel()  # Which the reader notices.

    async def _write(
        self, call: grpc.aio.StreamStreamCall, outgoing: asyncio.Queue[executor_pb2.ExecutorCommand]
    ) -> None:
        try:
            while True:
                await call.write(await outgoing.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            logger.debug("executor %s: stream ended while writing; the reader knows", self.state.name)
        except Exception:
            logger.exception("executor %s: bug while writing", self.state.name)
            call.cancel()  # Which the reader notices.

    def _greet(self, event: executor_pb2.ExecutorEvent) -> None:
        if not event.HasField("hello"):
            raise StreamEnded(
                Phase.REFUSED, f"its first event is not a hello but {event.WhichOneof('event')}"
            )
        hello = event.hello
        if hello.protocol_version != PROTOCOL_VERSION:
            theirs = f"it speaks protocol {hello.protocol_version}"
            raise StreamEnded(Phase.REFUSED, f"{theirs}, this scheduler {PROTOCOL_VERSION}")
        if hello.model_fingerprint != self._settings.fingerprint:
            theirs = f"it serves a model with fingerprint {hello.model_fingerprint or '(none)'}"
            raise StreamEnded(Phase.REFUSED, f"{theirs}, this scheduler {self._settings.fingerprint}")
        self.state.instance_id = hello.instance_id
        self.state.limits = limits_of(hello)
        self.state.residency = Residency.from_snapshot(hello.residency_number, copies_of(hello.residency))
        for digest, adapter in self.kept.unpinned:
            self._send_unpin(digest, adapter)
        self.kept.unpinned.clear()
        for (digest, adapter), tier in self.kept.pins.items():
            self._send_pin(digest, adapter, tier)
        self._set_phase(Phase.CONNECTING, "waiting for its first report")

    def _handle(self, event: executor_pb2.ExecutorEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "step":
            self._listener.on_tokens(self.state.name, tokens_of(event.step))
            for finished in event.step.finished:
                self._finished(finished)
        elif kind == "finished":
            self._finished(event.finished)
        elif kind == "rejected":
            if self.state.ended(event.rejected.dispatch_id, time.monotonic()):
                self._listener.on_rejected(self.state.name, event.rejected)
        elif kind == "residency":
            self._apply(event.residency)
        elif kind == "dropped":
            self.state.dropping.pop(event.dropped.number, None)
        elif kind == "load":
            self._report(event.load)
        else:
            logger.warning("executor %s: ignored an event of kind %s", self.state.name, kind)

    def _finished(self, finished: executor_pb2.Finished) -> None:
        if self.state.ended(finished.dispatch_id, time.monotonic()):
            self._listener.on_finished(finished)

    def _apply(self, delta: executor_pb2.ResidencyDelta) -> None:
        removed = [(entry.digest, Tier(entry.tier)) for entry in delta.removed]
        if not self.state.moved(delta.number, copies_of(delta.added), removed, time.monotonic()):
            raise StreamEnded(Phase.CONNECTING, f"a residency report before number {delta.number} is missing")

    def _report(self, load: executor_pb2.Load) -> None:
        if load.last_step_age_ms > self._settings.step_timeout_s * 1000 and load.waiting + load.running:
            raise StreamEnded(Phase.HUNG, f"no step ended for {load.last_step_age_ms / 1000:.0f} s")
        self._failures = 0
        self.state.reported(report_of(load, time.monotonic()))
        if load.state == executor_pb2.LOAD_STATE_DRAINING:
            self._set_phase(Phase.DRAINING, "it drains")
        else:
            self._set_phase(Phase.READY, "")
        self._listener.on_room()

    def _set_phase(self, phase: Phase, detail: str) -> None:
        if (phase, detail) == (self.state.phase, self.state.detail):
            return
        level = logging.WARNING if phase in (Phase.REFUSED, Phase.HUNG) else logging.INFO
        logger.log(level, "executor %s: %s %s", self.state.name, phase.name, detail)
        self.state.phase, self.state.detail = phase, detail
        self._listener.on_phase()

    def _forget(self, end: StreamEnded) -> None:
        self._failures += 1
        crashed = self.state.phase is not Phase.DRAINING
        lost = self.state.reset()
        self._set_phase(end.phase, end.detail)
        self._listener.on_lost(self.state.name, lost, end.detail, crashed=crashed)

    def _backoff(self) -> float:
        doublings = min(self._failures, 32)  # No float holds 2 ** 1024: an executor may be away for hours.
        longest = min(self._settings.max_backoff_s, self._settings.min_backoff_s * 2.0**doublings)
        return longest * random.uniform(0.5, 1.0)
