"""An executor on virtual time: the production hub and slot table, and an engine that only counts.

It steps every `STEP_S` while it has work, and each of its messages takes `DELAY_S`. What the batcher does
about slots is done here in a few lines; blocks, prompts and tokens cost nothing.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

from executor.adapters.residency import Copy, Residency, ResidencyDelta, Tier
from executor.batch.sampling import SampledToken
from executor.batch.sequence import Dispatch, FinishReason, Key
from executor.batch.slots import SlotTable
from executor.engine_thread import EngineThread
from executor.events import EngineInfo, Finished, NewToken, Rejected, Status, StepEvents
from executor.hub import Hub, Stream
from executor.outbox import Outbox
from executor.rejection import no_seats
from lorafleet.v1 import executor_pb2
from tests.support.services.virtual_time import World

STEP_S = 0.01
LOAD_S = 0.02  # from the store into host memory
LOADERS = 4
DELAY_S = 0.001
REPORT_S = 0.75
AGING_S = 2.0
TOKENS_AN_EVENT = 16  # so that the fair shares move while an answer runs

# When a request was accepted, its number at the executor, and its key.
_Place = tuple[float, int, Key]


@dataclass(slots=True)
class _Job:
    dispatch: Dispatch
    left: int
    arrived_at: float
    runs: bool = False


@dataclass(slots=True)
class _Beat:
    """What a step brought."""

    tokens: list[NewToken] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)


class VirtualExecutor:
    """A real hub and slot table; the engine between them takes one token a step for each that runs."""

    def __init__(
        self,
        world: World,
        address: str,
        seats: int = 64,
        slots: int = 16,
        *,
        max_rank: int = 16,
        max_model_len: int = 4096,
    ) -> None:
        self.address = address
        self.slots = SlotTable(slots)
        self.stalled_s = 0.0  # as EngineThread
        self._world = world
        self._seats = seats
        self.hub = Hub(cast(EngineThread, self), 1 << 20, world.clock)
        self._jobs: dict[Key, _Job] = {}
        self._line: list[_Place] = []  # Waits for slot and load, the oldest first.
        self._arrivals = count()
        self._users: Counter[str] = Counter()
        self._host: dict[str, None] = {}
        self._loading: set[str] = set()
        self._hints: dict[str, None] = {}
        self._residency = Residency()
        self._beat = _Beat()
        self._steps = 0
        self._wakes = False
        self._posts: dict[int, Callable[[executor_pb2.ExecutorEvent], None]] = {}
        self.rejects = Counter[str]()  # By version: so many of its next ones, as if all seats were taken.
        info = EngineInfo("m", "float32", "f", max_model_len, max_rank, ("q_proj",), slots, seats, 4096, 16)
        self.hub.ready(info)
        self._info = info
        world.every(REPORT_S, self._report, first=world.now + REPORT_S)

    def connect(self, deliver: Callable[[executor_pb2.ExecutorEvent], None]) -> Stream:
        stream = self.hub.open(self._info, ends_with_steps=True)
        self._posts[stream.number] = deliver
        self._post()
        return stream

    def receive(self, stream: Stream, command: executor_pb2.ExecutorCommand) -> None:
        self.hub.handle(stream, command)
        self._post()

    # What the hub asks of an engine.

    def submit(self, command: Callable[[Any], None]) -> None:
        command(self)
        self._wake()

    def add(self, dispatch: Dispatch) -> None:
        if self.rejects[dispatch.digest] > 0 or len(self._jobs) >= self._seats:
            self.rejects[dispatch.digest] -= 1
            self._beat.rejected.append(Rejected(dispatch.key, no_seats(self._seats)))
            return
        self._jobs[dispatch.key] = _Job(dispatch, dispatch.stop.max_new_tokens or 0, self._world.now)
        insort(self._line, (dispatch.accepted_at, next(self._arrivals), dispatch.key))
        if dispatch.digest:
            self._users[dispatch.digest] += 1

    def prefetch(self, digest: str, in_s: float = 0.0, uses: int = 1) -> None:
        self._hints[digest] = None

    # One step.

    def _wake(self) -> None:
        if not self._wakes:
            self._wakes = True
            self._world.at(self._world.now + STEP_S, self._step)

    def _step(self) -> None:
        self._wakes = False
        beat, self._beat = self._beat, _Beat()
        for job in [job for job in self._jobs.values() if job.runs]:
            self._draw(job, beat)
        self._load()
        starving = self._starving()
        for entry in list(self._line):
            if self._may_start(job := self._jobs[entry[2]], entry, starving):
                job.runs = True
                self._line.remove(entry)
        self._steps += 1
        runs = any(job.runs for job in self._jobs.values())
        parts = tuple(beat.tokens), tuple(beat.finished), tuple(beat.rejected)
        self.hub.take(StepEvents(self._steps, True, runs, *parts, self._delta(), self._status()))
        self._post()
        if self._jobs:
            self._wake()

    def _draw(self, job: _Job, beat: _Beat) -> None:
        dispatch = job.dispatch
        index = (dispatch.stop.max_new_tokens or 0) - job.left
        job.left -= 1
        if index % TOKENS_AN_EVENT == 0:
            beat.tokens.append(NewToken(dispatch.key, index, SampledToken(3, 0.0, ()), False))
        if not job.left:
            beat.finished.append(Finished(dispatch.key, FinishReason.LENGTH, 0))
            self._drop(dispatch)

    def _drop(self, dispatch: Dispatch) -> None:
        del self._jobs[dispatch.key]
        if digest := dispatch.digest:
            self.slots.release(cast(int, self.slots.find(digest)))
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]

    def _starving(self) -> _Place | None:
        """As the batcher: who lacks nothing but a slot for too long lets nobody younger join one in use."""
        for place in self._line:
            job = self._jobs[place[2]]
            digest = job.dispatch.digest
            if digest in self._host and self.slots.find(digest) is None:
                return place if self._world.now - job.arrived_at >= AGING_S else None
        return None

    def _may_start(self, job: _Job, place: _Place, starving: _Place | None) -> bool:
        """Takes a slot for it if it can have one."""
        digest = job.dispatch.digest
        if not digest:
            return True
        slot = self.slots.find(digest)
        if slot is not None and starving is not None and place > starving:
            return False
        if slot is None:
            assigned = self.slots.assign(digest) if digest in self._host else None
            if assigned is None:
                return False
            slot = assigned.slot
            self.slots.loaded(slot)
        self.slots.acquire(slot)
        return True

    def _load(self) -> None:
        """Who waits longest first, then hints."""
        wanted = dict.fromkeys(
            digest for *_, key in self._line if (digest := self._jobs[key].dispatch.digest)
        )
        for digest in (*wanted, *self._hints):
            is_here = digest in self._host or digest in self._loading
            if len(self._loading) < LOADERS and not is_here:
                self._loading.add(digest)
                self._world.at(self._world.now + LOAD_S, lambda digest=digest: self._loaded(digest))  # type: ignore[misc]
        self._hints.clear()

    def _loaded(self, digest: str) -> None:
        self._loading.discard(digest)
        self._host[digest] = None
        self._wake()

    # What it tells.

    def _delta(self) -> ResidencyDelta | None:
        host = [Copy(digest, Tier.HOST, 1) for digest in self._host]
        slots = [Copy(digest, Tier.SLOT, 1, slot) for digest, slot in self.slots.digests.items()]
        copies = [*host, *slots]
        return self._residency.update({copy.digest for copy in (*self._residency.copies, *copies)}, copies)

    def _status(self) -> Status:
        waiting = Counter(digest for *_, key in self._line if (digest := self._jobs[key].dispatch.digest))
        return Status(
            running=len(self._jobs) - len(self._line),
            waiting=len(self._line),
            free_seats=self._seats - len(self._jobs),
            free_slots=max(0, len(self.slots) - len(self._users)),
            running_by_digest=tuple(self._users.items()),
            waiting_by_digest=tuple(waiting.items()),
        )

    def _report(self) -> None:
        self.hub.lapse_waits()
        self.hub.tell_loads()
        self._post()

    def _post(self) -> None:
        for number, stream in self.hub.streams.items():
            for event in _read(stream.outbox):
                deliver = self._posts[number]
                self._world.at(self._world.now + DELAY_S, lambda e=event, d=deliver: d(e))  # type: ignore[misc]


def _read(outbox: Outbox) -> Iterator[executor_pb2.ExecutorEvent]:
    """All that is in it; a get that has something to return does not wait for anything."""
    while len(outbox):
        try:
            outbox.get().send(None)
        except StopIteration as got:
            yield got.value
