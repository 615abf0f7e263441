"""A scheduler on virtual time: what it decides is decided by the production queue, policy and fleet state.

Here are the planner's part, when it asks the policy and what it sends, and the link's, which tells the state.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from executor.hub import Stream
from lorafleet.v1 import executor_pb2
from scheduler.dispatch.groups import Waiting
from scheduler.dispatch.planning import Planning
from scheduler.dispatch.policy import Policy
from scheduler.dispatch.queue import Queue
from scheduler.fleet.index import FleetIndex
from scheduler.fleet.residency import Residency, Tier
from scheduler.fleet.state import ExecutorState, Phase
from scheduler.fleet.wire import copies_of, limits_of, report_of
from tests.support.services.virtual_executor import DELAY_S, TOKENS_AN_EVENT, VirtualExecutor
from tests.support.services.virtual_time import World

SWEEP_S = 0.25


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a test. `digest` "" is the base model."""

    digest: str = ""
    tenant: str = "acme"
    tokens: int = 128
    priority: int = 0
    rank: int = 8
    prompt: int = 64


class VirtualScheduler:
    """Over executors that others may use, too."""

    def __init__(
        self,
        world: World,
        executors: list[VirtualExecutor],
        *,
        aging_s: float = 2.0,
        reserve_seats: int = 0,
        salt: int = 0,
        weights: Mapping[str, float] | None = None,
        late: Collection[str] = (),
    ) -> None:
        self.queue = Queue(1 << 20, 1 << 20, weights=weights)
        self.stands_still = False  # It decides and says nothing, while its streams stay open.
        self.spent: Counter[str] = Counter()  # Tokens, by tenant.
        self.states = {each.address: ExecutorState(each.address) for each in executors}
        self._world = world
        self.executors = {each.address: each for each in executors}
        index = FleetIndex(tuple(self.states.values()), reserve_seats)
        self._planning = Planning(self.queue, Policy(self.queue, index, aging_s, salt))
        self._requests: dict[str, Waiting] = {}  # By dispatch id.
        self._asked: dict[int, Asked] = {}
        self._streams: dict[str, Stream] = {}
        self._wakes = False
        for each in executors:
            if each.address not in late:
                self.connect(each.address)
        world.every(SWEEP_S, self._sweep, first=world.now + SWEEP_S)

    def connect(self, address: str) -> None:
        """Executors that are `late` have said nothing before."""
        executor = self.executors[address]
        self._streams[address] = executor.connect(lambda event: self._take(address, event))

    def ask(self, asked: Asked) -> int:
        """A request, now. Returns its number."""
        world = self._world
        number = len(world.asked_at)
        world.asked_at[number] = world.now
        self._asked[number] = asked
        modules = frozenset({"q_proj"}) if asked.digest else frozenset[str]()
        request = Waiting(
            number=number,
            tenant=asked.tenant,
            digest=asked.digest,
            priority=asked.priority,
            cost=asked.prompt,
            max_rank=asked.rank if asked.digest else 0,
            modules=modules,
            max_length=asked.prompt + asked.tokens,
            arrived=world.now,
        )
        assert self.queue.full(asked.tenant) is None
        self._planning.arrive(request)
        self._wake()
        return number

    def _send(self, address: str, command: executor_pb2.ExecutorCommand) -> None:
        executor, stream = self.executors[address], self._streams[address]
        self._world.at(self._world.now + DELAY_S, lambda: executor.receive(stream, command))

    def _wake(self) -> None:
        if not self._wakes:
            self._wakes = True
            self._world.at(self._world.now, self._plan)

    def _sweep(self) -> None:
        if self.stands_still:
            return
        now = self._world.now
        self.queue.age(now)
        for wait in self._planning.tend(now):
            told = executor_pb2.Prefetch(
                digest=wait.digest,
                expected_uses=wait.uses,
                waiting_ms=math.ceil(1000 * wait.waiting_s),
                lasts_ms=math.ceil(1000 * wait.lasts_s),
            )
            self._send(wait.address, executor_pb2.ExecutorCommand(prefetch=told))
        self._wake()

    def _plan(self) -> None:
        self._wakes = False
        if self.stands_still:
            return
        now = self._world.now
        batches: dict[str, list[executor_pb2.Dispatch]] = {}
        while placement := self._planning.next(now):
            request = self._planning.take(placement)
            dispatch_id = f"{request.number}.{self._world.dispatches}"
            self._world.dispatches += 1
            self._requests[dispatch_id] = request
            self.states[placement.address].sent(dispatch_id, request.digest, now, request.tenant)
            waited = now - self._world.asked_at[request.number]
            dispatch = executor_pb2.Dispatch(
                dispatch_id=dispatch_id,
                digest=request.digest,
                prompt_token_ids=[5],
                waited_ms=round(1000 * waited),
            )
            dispatch.stopping.max_new_tokens = self._asked[request.number].tokens
            batches.setdefault(placement.address, []).append(dispatch)
        for address, batch in batches.items():
            command = executor_pb2.ExecutorCommand()
            command.dispatch.dispatches.extend(sorted(batch, key=lambda each: each.digest))
            self._send(address, command)
        while self._planning.may_hint:
            if hint := self._planning.hint():
                told = executor_pb2.Prefetch(digest=hint.digest, expected_uses=hint.uses)
                self._send(hint.address, executor_pb2.ExecutorCommand(prefetch=told))

    def _take(self, address: str, event: executor_pb2.ExecutorEvent) -> None:
        state, now = self.states[address], self._world.now
        kind = event.WhichOneof("event")
        if kind == "hello":
            state.limits = limits_of(event.hello)
            state.residency = Residency.from_snapshot(
                event.hello.residency_number, copies_of(event.hello.residency)
            )
        elif kind == "load":
            state.reported(report_of(event.load, now))
            if state.phase is not Phase.READY:
                state.phase = Phase.READY
        elif kind == "residency":
            removed = [(entry.digest, Tier(entry.tier)) for entry in event.residency.removed]
            assert state.moved(event.residency.number, copies_of(event.residency.added), removed, now)
        elif kind == "rejected":
            self._world.refused += 1
            state.ended(event.rejected.dispatch_id, now)
            request = self._requests.pop(event.rejected.dispatch_id)
            self.queue.put_back(request, request.arrived)
        else:
            self._take_step(state, event.step)
        self._wake()

    def _take_step(self, state: ExecutorState, step: executor_pb2.StepTokens) -> None:
        now = self._world.now
        for dispatch_id in step.dispatch_ids:
            request = self._requests[dispatch_id]
            self._world.started.setdefault(request.number, now)
            self.queue.charge(request.tenant, request.digest, TOKENS_AN_EVENT)
            self.spent[request.tenant] += TOKENS_AN_EVENT
        for end in step.finished:
            request = self._requests.pop(end.dispatch_id)
            state.ended(end.dispatch_id, now)
            self._world.ended[request.number] = now

    def check(self) -> None:
        self.queue.check()
        for state in self.states.values():
            state.check()
