"""A scheduler on virtual time: queue, policy, planning and the executors' states are the real ones.

Here is what the product has on its event loop: when it plans, and how commands and events travel.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.dispatch.estimates.full_queue import FullQueue
from scheduler.dispatch.groups import Waiting
from scheduler.dispatch.planning import Planning
from scheduler.dispatch.policy import Policy
from scheduler.dispatch.queue import Queue
from scheduler.dispatch.settings import DispatcherSettings
from scheduler.fleet.index import FleetIndex
from scheduler.fleet.state import ExecutorState, Phase
from scheduler.simulate.adapters import MODULES, Catalog
from scheduler.simulate.clock import Clock
from scheduler.simulate.executors.executor import Executor
from scheduler.simulate.executors.messages import Dispatched, Said, Stream
from scheduler.simulate.requests import Asked, End, Record

PolicyMaker = Callable[[Queue, FleetIndex, float, int], Policy]
"""Of queue, index, seconds until a version is overdue, and the salt."""

Gate = Callable[["Scheduler", Waiting, Record], float | None]
"""Admission by deadline: the seconds of its estimate where a request is refused by it, else None."""


def no_gate(scheduler: "Scheduler", waiting: Waiting, record: Record) -> float | None:
    """Refuses nothing."""
    return None


class Watcher:
    """Told of turns in the life of each request that was let in; does nothing."""

    def left(self, waiting: Waiting) -> None:
        """It went to an executor for the first time, or its deadline passed before."""

    def began(self, record: Record) -> None:
        """It has its first token."""

    def ended(self, waiting: Waiting, record: Record) -> None:
        """It was answered, or its deadline passed."""


@dataclass(slots=True, eq=False)
class _Link:
    executor: Executor
    stream: Stream
    running: dict[str, Record] = field(default_factory=dict)
    is_open: bool = True


class Scheduler:
    """Over executors that are all there from the beginning, or join later."""

    def __init__(
        self,
        clock: Clock,
        executors: list[Executor],
        catalog: Catalog,
        make_policy: PolicyMaker,
        *,
        settings: DispatcherSettings,
        link_s: float,
        salt: int = 0,
        late: frozenset[str] = frozenset(),
        gate: Gate = no_gate,
        watcher: Watcher | None = None,
        on_end: Callable[[Record], None] = lambda record: None,
        name: str = "",
    ) -> None:
        """`late` executors, by name, are connected by `join`. `link_s` is one way. `on_end` is told of each
        request that has ended."""
        self.queue = Queue(
            settings.max_queued,
            settings.max_queued_per_tenant,
            settings.prompt_token_price,
            settings.priority_aging_s,
            settings.weights,
        )
        self._full_queue = FullQueue(self.queue)
        self.clock = clock
        self.name = name  # Another one for each over the same executors.
        self.prompt_token_price = settings.prompt_token_price
        self.records: list[Record] = []
        self.states: dict[str, ExecutorState] = {}  # Of members, by name.
        self.index = FleetIndex((), settings.fleet.reserve_seats)
        self.policy = make_policy(self.queue, self.index, settings.aging_s, salt)
        self._planning = Planning(self.queue, self.policy)
        self._executors = {each.name: each for each in executors}
        self._catalog = catalog
        self._settings = settings
        self._link_s = link_s
        self._gate = gate
        self._watcher = watcher or Watcher()
        self._on_end = on_end
        self._links: dict[str, _Link] = {}
        self._live: dict[int, Waiting] = {}
        self._woken = False
        self._next_at = 0.0
        for name in self._executors:
            if name not in late:
                self.join(name)
        clock.at(clock.now + settings.sweep_interval_s, self._sweep)

    # Executors.

    def join(self, name: str) -> None:
        """Makes an executor a member, and connects to it."""
        self.states[name] = ExecutorState(name)
        self.index.join(self.states[name])
        self._connect(name)

    def leave(self, name: str) -> None:
        """New requests go elsewhere from now on; it is a member until what it runs has ended."""
        self.states[name].leaving = True
        self._part(name)
        self._wake()

    def lose(self, name: str) -> None:
        """Its stream ends for good, and what ran there goes elsewhere; it stays a member."""
        link, state = self._links.pop(name), self.states[name]
        link.is_open = False
        link.executor.close(link.stream)
        state.reset()
        state.phase = Phase.CONNECTING
        for record in link.running.values():
            self._put_back(record)
        self._wake()

    def _connect(self, name: str) -> None:
        executor, state = self._executors[name], self.states[name]
        link = _Link(executor, Stream(lambda said: None))
        link.stream = executor.connect(lambda said: self._travel(link, said))
        self._links[name] = link
        state.limits = executor.limits
        state.residency = executor.snapshot()

    def _part(self, name: str) -> None:
        """It is no member any more, once it runs nothing."""
        state = self.states[name]
        if state.leaving and not state.num_running:
            self.index.leave(self.index.states.index(state))
            del self.states[name]
            link = self._links.pop(name)
            link.is_open = False
            link.executor.close(link.stream)

    def _travel(self, link: _Link, said: Said) -> None:
        self.clock.at(self.clock.now + self._link_s, self._take, link, said)

    # Requests.

    def ask(self, asked: Asked) -> Record:
        """A request, now."""
        now = self.clock.now
        record = Record(asked, len(self.records))
        self.records.append(record)
        waiting = Waiting(
            number=record.number,
            tenant=asked.tenant,
            digest=asked.digest,
            priority=0,
            cost=asked.prompt,
            max_rank=self._catalog.ranks[asked.digest] if asked.digest else 0,
            modules=MODULES if asked.digest else frozenset(),
            max_length=asked.prompt + asked.output,
            session=asked.session,
            arrived=now,
        )
        self.queue.follow(self.index.lengths)
        if not self.index.may_ever_run(self.queue.needs(waiting)):
            self._ended(record, End.UNFIT)
            return record
        record.retry_after_s = self._full_queue.check(asked.tenant, asked.request_id, now, enters=True)
        if record.retry_after_s is not None or self.queue.full(asked.tenant) == "tenant":
            self._ended(record, End.FULL)
            return record
        record.estimate_s = self._gate(self, waiting, record)
        if record.estimate_s is not None:
            self._ended(record, End.REFUSED)
            return record
        self._live[record.number] = waiting
        self._planning.arrive(waiting)
        if asked.deadline_s is not None:
            self.clock.at(asked.at + asked.deadline_s, self._miss, record)
        self._wake()
        return record

    @property
    def num_live(self) -> int:
        return len(self._live)

    def _miss(self, record: Record) -> None:
        if record.end is not End.OPEN:
            return
        self.queue.discard(record.number)
        if link := self._links.get(record.executor):
            dispatch_id = self._dispatch_id(record)
            if link.running.pop(dispatch_id, None):
                self.states[record.executor].ended(dispatch_id, self.clock.now)
                self.clock.at(self.clock.now + self._link_s, link.executor.cancel, link.stream, dispatch_id)
        self._ended(record, End.MISSED)

    def _ended(self, record: Record, end: End) -> None:
        record.end, record.ended_at = end, self.clock.now
        if waiting := self._live.pop(record.number, None):
            if not record.attempts:
                self._left(waiting)
            self._watcher.ended(waiting, record)
        self._on_end(record)

    def _left(self, waiting: Waiting) -> None:
        """The queue, for the first time."""
        self._full_queue.left(self.clock.now)
        self._watcher.left(waiting)

    def _put_back(self, record: Record) -> None:
        waiting = self._live[record.number]
        since = waiting.arrived if record.first_at is None else self.clock.now
        self.queue.put_back(waiting, since)

    # Plans.

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self.clock.at(max(self.clock.now, self._next_at), self._plan)

    def _sweep(self) -> None:
        now = self.clock.now
        self.clock.at(now + self._settings.sweep_interval_s, self._sweep)
        self.queue.age(now)
        for wait in self._planning.tend(now):
            link = self._links[wait.address]
            told = (link.stream, wait.digest, wait.uses, wait.waiting_s, wait.lasts_s)
            self.clock.at(now + self._link_s, link.executor.tell_wait, *told)
        self._wake()

    def _plan(self) -> None:
        self._woken = False
        now = self.clock.now
        batches: dict[str, list[Dispatched]] = {}
        while (placement := self._planning.next(now)) or self._planning.has_more:
            if placement:
                waiting = self._planning.take(placement)
                batches.setdefault(placement.address, []).append(self._begin(waiting, placement.address))
        for name, batch in batches.items():
            link = self._links[name]
            self.clock.at(now + self._link_s, link.executor.receive, link.stream, batch)
        if batches:
            self._next_at = now + self._settings.plan_pause_s
        while self._planning.may_hint:
            if hint := self._planning.hint():
                executor = self._links[hint.address].executor
                self.clock.at(now + self._link_s, executor.hint, hint.digest, hint.need_by_s, hint.uses)

    def _begin(self, waiting: Waiting, name: str) -> Dispatched:
        now, record = self.clock.now, self.records[waiting.number]
        record.attempts += 1
        record.executor, record.before = name, record.tokens
        if record.sent_at is None:
            record.sent_at = now
            self._left(waiting)
        dispatch_id, asked = self._dispatch_id(record), record.asked
        self.states[name].sent(dispatch_id, waiting.digest, now, waiting.tenant)
        self._links[name].running[dispatch_id] = record
        return Dispatched(
            dispatch_id,
            waiting.digest,
            asked.prompt + record.tokens,
            asked.output - record.tokens,
            waiting.arrived,
            asked.session,
            asked.shared,
        )

    def _dispatch_id(self, record: Record) -> str:
        """The id of its last attempt."""
        return f"{self.name} {record.number}.{record.attempts}"

    # What executors say (scheduler/fleet/link.py, scheduler/dispatch/dispatcher.py).

    def _take(self, link: _Link, said: Said) -> None:
        if not link.is_open:
            return
        now, state = self.clock.now, self.states[link.executor.name]
        for dispatch_id, count in said.tokens:
            if record := link.running.get(dispatch_id):
                self._count(record, count)
        for dispatch_id, cached in said.finished:
            if record := link.running.pop(dispatch_id, None):
                state.ended(dispatch_id, now)
                record.cached = cached
                self._charge(record, record.asked.output - record.tokens)
                record.tokens = record.asked.output
                self._ended(record, End.ANSWERED)
        for dispatch_id in said.rejected:
            if record := link.running.pop(dispatch_id, None):
                state.ended(dispatch_id, now)
                self._put_back(record)
        if said.delta is not None:
            state.moved(*said.delta, now)
        if said.report is not None:
            state.reported(said.report)
            if state.phase is Phase.CONNECTING:
                state.phase = Phase.READY
        if said.finished:
            self._part(link.executor.name)
        self._wake()

    def _count(self, record: Record, count: int) -> None:
        """`count` is of this attempt."""
        if record.first_at is None:
            record.first_at = self.clock.now
            self._watcher.began(record)
        made = record.before + count - record.tokens
        self._charge(record, made)
        record.tokens += made

    def _charge(self, record: Record, tokens: int) -> None:
        if tokens:
            self.queue.charge(record.asked.tenant, record.asked.digest, tokens)

    def check(self) -> None:
        """Raises AssertionError when a request is lost, or an index is wrong."""
        self.queue.check()
        self.index.check()
        running = {record.number for link in self._links.values() for record in link.running.values()}
        waiting = {request.number for request in self.queue.requests()}
        assert not running & waiting and running | waiting == self._live.keys()
