"""Hands each event of the engine to the scheduler's stream that it is for, and counts seats and slots.

All of it is on the event loop. Seats and slots are counted here for the reports: a dispatch takes its own
from its receipt to its end, so that a report agrees with the dispatches that it says were received. The
engine counts for itself when it accepts.

Each load tells every scheduler of the same free seats, so two of them may take the same one. A dispatch that
was told of a seat is therefore never refused for want of one: it waits here for the next. Any other goes to
the engine at once, which hands it back unless a seat is free.
"""

import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from executor import wire as convert
from executor.adapters.cold_waits import ColdWait, ColdWaits
from executor.adapters.names import AdapterNames
from executor.adapters.residency import Residency
from executor.batch.sequence import Dispatch
from executor.engine import Engine
from executor.engine_thread import EngineThread
from executor.errors import InvalidDispatch
from executor.events import EngineInfo, Finished, NewToken, Rejected, Status, StepEvents
from executor.metrics import Snapshot
from executor.outbox import Outbox
from executor.rejection import Rejection, draining, rejection_of
from executor.waiting_room import WaitingRoom
from lorafleet.v1 import executor_pb2

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Stream:
    """One Execute call. `live` are its dispatches that have not ended, with the digest of each; `received`
    counts all it ever sent."""

    number: int
    outbox: Outbox
    live: dict[str, str] = field(default_factory=dict)
    received: int = 0
    promised: int = 0
    ends_with_steps: bool = False  # in one event; else each end has its own
    cut_off: bool = False  # for not reading
    engine_lost: bool = False  # its end is a failure


class Hub:
    def __init__(
        self, engine: EngineThread, outbox_messages: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.instance_id = uuid.uuid4().hex
        self.info: EngineInfo | None = None
        self.streams: dict[int, Stream] = {}
        self._engine = engine
        self._outbox_messages = outbox_messages
        self._clock = clock
        self._residency = Residency()
        self._status = Status()
        self._opened = 0
        self._cold = ColdWaits()
        self._room = WaitingRoom()
        self._names = AdapterNames()
        # Room and cold waits in the last reports; None: one is owed.
        self._told: tuple[int, int, tuple[ColdWait, ...]] | None = None

    @property
    def num_live(self) -> int:
        return sum(len(stream.live) for stream in self.streams.values())

    @property
    def draining(self) -> bool:
        return self._status.draining

    @property
    def _max_seats(self) -> int:
        return self.info.max_seats if self.info else 0

    @property
    def free_seats(self) -> int:
        return 0 if self._status.draining else max(0, self._max_seats - self.num_live)

    @property
    def free_slots(self) -> int:
        """What the engine said, less what the dispatches will claim that it has not seen yet."""
        status = self._status
        live = {digest for stream in self.streams.values() for digest in stream.live.values() if digest}
        seen = {digest for digest, _ in (*status.running_by_digest, *status.waiting_by_digest)}
        return max(0, status.free_slots - len(live - seen))

    def snapshot(self) -> Snapshot | None:
        """The figures for the gauges; from any thread."""
        if self.info is None:
            return None
        return Snapshot(self.info, self._status, self._residency.copies, self._names.of)

    def ready(self, info: EngineInfo) -> None:
        self.info = info
        self._status = Status(
            free_seats=info.max_seats, free_kv_blocks=info.num_kv_blocks, free_slots=info.max_loras
        )

    def hello(self, info: EngineInfo) -> executor_pb2.Hello:
        return convert.hello(info, self.instance_id, self._residency)

    def open(self, info: EngineInfo, *, ends_with_steps: bool = False) -> Stream:
        """A new stream, with hello and a first load in its outbox."""
        self._opened += 1
        stream = Stream(self._opened, Outbox(self._outbox_messages), ends_with_steps=ends_with_steps)
        self.streams[stream.number] = stream
        stream.outbox.put(executor_pb2.ExecutorEvent(hello=self.hello(info)))
        self._tell_load(stream)
        return stream

    def close(self, stream: Stream) -> None:
        """The end of a stream cancels its dispatches. Closing it again does nothing."""
        if self.streams.pop(stream.number, None) is not None:
            stream.outbox.discard()
            self._cold.close(stream.number)
            self._cancel(stream, list(stream.live))
            self.tell_room()

    def cut_off_overdue(self, now: float, timeout_s: float) -> None:
        """Close the streams whose outbox has been full for `timeout_s`; call it regularly."""
        for stream in list(self.streams.values()):
            if stream.outbox.overdue(now, timeout_s):
                logger.warning("stream %d is closed: its scheduler does not read", stream.number)
                stream.cut_off = True
                self.close(stream)

    def lapse_waits(self) -> None:
        """Forget cold waits that their schedulers have not told again in time; call it regularly."""
        self._cold.lapse(self._clock())
        self.tell_room()

    def handle(self, stream: Stream, command: executor_pb2.ExecutorCommand) -> None:
        """Commands of a closed stream are ignored."""
        if stream.number not in self.streams:
            return
        match command.WhichOneof("command"):
            case "dispatch":
                # Who sent it counts for itself. A report comes with the next step, also when all have ended
                # in it and the room is the same: until then their seats are not used again.
                self._dispatch(stream, command.dispatch.dispatches)
                self._told = None
                return
            case "cancel":
                self._cancel(stream, command.cancel.dispatch_ids)
            case "prefetch":
                self._prefetch(stream, command.prefetch)
            case "pin":
                digest, tier = command.pin.digest, convert.tier_from(command.pin.tier)
                adapter = command.pin.adapter
                self._names.told(digest, adapter)
                self._engine.submit(lambda engine: engine.pin(digest, tier, adapter))
            case "unpin":
                digest, adapter = command.unpin.digest, command.unpin.adapter
                self._engine.submit(lambda engine: engine.unpin(digest, adapter))
            case "drop":
                digest, adapter = command.drop.digest, command.drop.adapter
                key = (stream.number, command.drop.number) if command.drop.number else None
                self._engine.submit(lambda engine: engine.drop(digest, adapter, key))
            case "drain":
                self._engine.submit(lambda engine: engine.drain())
            case unknown:
                logger.warning("a command that this version does not know is ignored: %s", unknown)
        self.tell_room()

    def take(self, events: StepEvents) -> None:
        """Spread what a step brought: its tokens, then ends, then residency, then which drops are done, then
        room if it changed."""
        self._status = events.status
        self._tell_step(events)
        for refused in events.rejected:
            if stream := self._ended(refused.key):
                stream.outbox.put(convert.rejected_event(refused))
        self._seat()
        if events.residency is not None:
            self._residency.apply(events.residency)
            for stream in self.streams.values():
                stream.outbox.put(convert.residency_event(events.residency))
        for number, drop in events.dropped:
            if asking := self.streams.get(number):
                asking.outbox.put(convert.dropped_event(drop))
        self.tell_room()

    def tell_loads(self) -> None:
        """A load to every stream that takes events at all; once a second or more."""
        for stream in self.streams.values():
            if not stream.outbox.full:
                self._tell_load(stream)

    def tell_room(self) -> None:
        room = (self.free_seats, self.free_slots, self._cold.line())
        if room != self._told:
            self._told = room
            self.tell_loads()

    def hand_back(self) -> None:
        """Reject everything that still lives as retryable, and end all streams once that is written."""
        for stream in self.streams.values():
            for dispatch_id in sorted(stream.live):
                self._refuse(stream, dispatch_id, draining())
            self._cancel(stream, list(stream.live))
        self.end_streams()

    def end_streams(self, *, engine_lost: bool = False) -> None:
        """Ends them as soon as what is in their outboxes is written."""
        for stream in self.streams.values():
            stream.engine_lost = engine_lost
            stream.outbox.close()

    def _prefetch(self, stream: Stream, hint: executor_pb2.Prefetch) -> None:
        digest, in_s, uses = hint.digest, hint.need_by_ms / 1000, hint.expected_uses
        if hint.waiting_ms:
            now = self._clock()
            until = now + hint.lasts_ms / 1000 if hint.lasts_ms else math.inf
            if not self._cold.begin(stream.number, digest, now - hint.waiting_ms / 1000, until):
                return  # It only says again that it waits.
        elif self._cold.end(stream.number, digest) or hint.lasts_ms:
            return  # It says that nobody waits any more.
        self._engine.submit(lambda engine: engine.prefetch(digest, in_s, uses))

    def _dispatch(self, stream: Stream, messages: Iterable[executor_pb2.Dispatch]) -> None:
        now = self._clock()
        untold: list[Dispatch] = []
        for message in messages:
            stream.received += 1
            try:
                if message.dispatch_id in stream.live:
                    raise InvalidDispatch(f"dispatch_id {message.dispatch_id!r} is used already")
                dispatch = convert.dispatch_from(message, stream.number, now)
            except InvalidDispatch as error:
                self._refuse(stream, message.dispatch_id, rejection_of(error))
                continue
            if stream.received <= stream.promised:
                self._room.add(dispatch)
            else:
                untold.append(dispatch)
            stream.live[message.dispatch_id] = message.digest
            self._cold.end(stream.number, message.digest)
            self._names.told(message.digest, message.adapter)
        self._seat(untold)

    def _seat(self, untold: Sequence[Dispatch] = ()) -> None:
        """Hand on to the engine, which knows of all ends so far, those that have a seat now, then the untold.
        When it drains it gets all, to hand them back."""
        taken = self.num_live - len(untold) - len(self._room)
        free = len(self._room) if self.draining else self._max_seats - taken
        seated = [*self._room.take(free), *untold]

        def add(engine: Engine) -> None:
            for dispatch in seated:
                engine.add(dispatch)

        if seated:
            self._engine.submit(add)

    def _cancel(self, stream: Stream, dispatch_ids: Iterable[str]) -> None:
        keys = {(stream.number, name) for name in dispatch_ids if name in stream.live}
        for _, name in keys:
            stream.live.pop(name, None)
        seated = keys - self._room.discard(keys)

        def cancel(engine: Engine) -> None:
            for key in seated:
                engine.cancel(key)

        if seated:
            self._engine.submit(cancel)
            self._seat()

    def _refuse(self, stream: Stream, dispatch_id: str, rejection: Rejection) -> None:
        stream.outbox.put(convert.rejected_event(Rejected((stream.number, dispatch_id), rejection)))

    def _tell_step(self, events: StepEvents) -> None:
        tokens: dict[int, list[NewToken]] = {}
        ends: dict[int, list[Finished]] = {}
        for token in events.tokens:
            number, dispatch_id = token.key
            stream = self.streams.get(number)
            # What was cancelled may still have been in the step.
            if stream is not None and dispatch_id in stream.live:
                tokens.setdefault(number, []).append(token)
        for end in events.finished:
            if stream := self._ended(end.key):
                ends.setdefault(stream.number, []).append(end)
        for number in tokens | ends:
            self._put_step(self.streams[number], events.step, tokens.get(number, []), ends.get(number, []))

    def _put_step(
        self, stream: Stream, step: int, tokens: Sequence[NewToken], ends: Sequence[Finished]
    ) -> None:
        """A message costs both sides more than an end in it does."""
        if stream.ends_with_steps:
            events = convert.step_events(step, tokens, ends)
        else:
            told = convert.step_events(step, tokens) if tokens else ()
            events = chain(told, map(convert.finished_event, ends))
        for event in events:
            stream.outbox.put(event)

    def _ended(self, key: tuple[int, str]) -> Stream | None:
        """The stream that must hear of it; None when it is gone or has cancelled it."""
        stream = self.streams.get(key[0])
        if stream is None or key[1] not in stream.live:
            return None
        del stream.live[key[1]]
        return stream

    def _tell_load(self, stream: Stream) -> None:
        # What the engine has not seen yet waits, too: it may be stuck in a step.
        seen = self._max_seats - self._status.free_seats
        waiting = self._status.waiting + max(0, self.num_live - seen)
        stream.promised = max(stream.promised, stream.received + self.free_seats)
        load = convert.Load(
            self.free_seats,
            self.free_slots,
            waiting,
            self._engine.stalled_s,
            stream.received,
            self._cold.line(),
        )
        stream.outbox.put(convert.load_event(self._status, load, self._clock()))
