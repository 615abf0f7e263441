"""Queue, policy and fleet under any order of events: nobody is lost or sent twice, no room is exceeded, and
nothing waits that could run. `LORAFLEET_EXAMPLES` asks for more examples."""

import os
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.dispatch.groups import Waiting
from scheduler.dispatch.queue import Queue
from scheduler.fleet.residency import Copy, Residency, Tier
from scheduler.fleet.state import ExecutorState, Limits, Phase, Report
from tests.support.services.planning import MODULES, Fleet, request

RESERVE = 2  # Where there are 16 seats; one where there are 8.
RANKS = {"": 0, "u": 4, "v": 4, "w": 8, "x": 8, "y": 4, "z": 64, "p": 4, "q": 4, "r": 8}
LIMITS = [  # Fewer slots than versions: some wait for one.
    Limits(100, 8, MODULES, max_loras=1, max_seats=3),
    Limits(100, 4, MODULES, max_loras=1, max_seats=8),
    Limits(200, 8, MODULES, max_loras=4, max_seats=16),
]
which = st.integers(0, len(LIMITS) - 1)
any_of = st.integers(0, 1_000_000)


class PlanningMachine(RuleBasedStateMachine):
    """Executors run what they were sent until told otherwise, and report only now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.states = [ExecutorState(f"e:{number}") for number in range(len(LIMITS))]
        self.fleet = Fleet(Queue(1000, 1000, weights={"a": 2.0}), *self.states, aging_s=0.5, reserve=RESERVE)
        self.now = 0.0
        self.deltas = [0] * len(LIMITS)
        self.others: list[tuple[tuple[str, float], ...]] = [()] * len(LIMITS)  # Who waits cold elsewhere.
        self.told: list[dict[str, float]] = [{} for _ in LIMITS]  # As executors remember it: who does here.
        self.limits = list(LIMITS)  # Of each, as it told them last.
        self.running: dict[int, tuple[str, Waiting]] = {}
        self.expected: dict[int, Waiting] = {}
        self.last = 0

    @initialize(pinned=st.booleans())
    def begin(self, pinned: bool) -> None:
        """Most runs are too short for versions to wait if they have to wait for a connection first."""
        for at in range(len(LIMITS)):
            self.connect(at, pinned, at)

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.integers(-1, 1),
        length=st.sampled_from([50, 150, 250]),
        digests=st.lists(st.sampled_from(sorted(RANKS)), min_size=1, max_size=5),
        session=st.sampled_from(["", "s", "t"]),
    )
    def add(self, tenant: str, digests: list[str], priority: int, length: int, session: str) -> None:
        for digest in digests:
            self.last += 1
            item = request(
                self.last,
                digest,
                tenant,
                rank=RANKS[digest],
                priority=priority,
                length=length,
                arrived=self.now,
                session=session,
            )
            assert self.fleet.queue.add(item) is None
            self.expected[item.number] = item

    @precondition(lambda self: self.expected)
    @rule(pick=any_of)
    def cancel(self, pick: int) -> None:
        number = sorted(self.expected)[pick % len(self.expected)]
        del self.expected[number]
        if number in self.running:
            address, _ = self.running.pop(number)
            assert self.fleet.states[address].ended(str(number), self.now)
        else:
            assert self.fleet.queue.discard(number)

    @precondition(lambda self: self.running)
    @rule(picks=st.lists(any_of, min_size=1, max_size=4))
    def finish(self, picks: list[int]) -> None:
        for pick in picks[: len(self.running)]:
            number = sorted(self.running)[pick % len(self.running)]
            address, item = self.running.pop(number)
            assert self.fleet.states[address].ended(str(number), self.now)
            self.fleet.queue.charge(item.tenant, item.digest, 10)
            del self.expected[number]

    @precondition(lambda self: self.running)
    @rule(pick=any_of, refused=st.booleans())
    def fail(self, pick: int, refused: bool) -> None:
        number = sorted(self.running)[pick % len(self.running)]
        address, item = self.running.pop(number)
        assert self.fleet.states[address].ended(str(number), self.now)
        where = frozenset({address})
        item = replace(item, refused=item.refused | where) if refused else replace(item, avoid=where)
        self.expected[number] = item
        self.fleet.queue.put_back(item, item.arrived)

    @rule(at=which)
    def lose(self, at: int) -> None:
        state = self.states[at]
        self.told[at].clear()
        for key in state.reset():
            _, item = self.running.pop(int(key))
            self.fleet.queue.put_back(item, item.arrived)
        state.phase = Phase.HUNG

    @rule(at=which, pinned=st.booleans(), kind=which)
    def connect(self, at: int, pinned: bool, kind: int) -> None:
        """It may have been started again with other limits."""
        state = self.states[at]
        if state.limits is None and not state.leaving:
            state.limits = self.limits[at] = LIMITS[kind]
            state.residency = Residency.from_snapshot(0, [Copy("u", Tier.HOST, 0, 1, pinned)])
            self.deltas[at] = 0
            state.phase = Phase.READY
            self.report(at)

    @rule(at=which)
    def leave(self, at: int) -> None:
        """It gets nothing new, and goes when nothing runs there any more, which is at once with luck."""
        state = self.states[at]
        if not state.leaving:
            state.leaving = True
            self.report(at)
        if not state.num_running:
            self.go(at)

    @rule(at=which, moved=st.booleans(), kind=which)
    def join(self, at: int, moved: bool, kind: int) -> None:
        """Under the name of the one that left, with luck at another address and in another's position."""
        if self.states[at].name not in self.fleet.states:
            state = ExecutorState(f"{'moved' if moved else 'e'}:{at}", name=f"e:{at}")
            self.states[at] = self.fleet.states[state.name] = state
            self.fleet.index.join(state)
            self.connect(at, False, kind)

    @rule(at=which)
    def go(self, at: int) -> None:
        """Whatever it holds."""
        state = self.states[at]
        if state.name in self.fleet.states:
            if not state.leaving:
                state.leaving = True
            self.lose(at)
            self.fleet.leave(state.name)

    @rule(at=which)
    def report(self, at: int) -> None:
        """Honest, of all that was sent."""
        state = self.states[at]
        if state.limits is None:
            return
        self.load(state, at)
        used = len({*state.claimed()})
        seats, slots = state.limits.max_seats - state.num_running, state.limits.max_loras - used
        cold = (*self.others[at], *((digest, since) for digest, since in self.told[at].items()))
        state.reported(Report(seats, slots, received=state.num_sent, cold=cold))

    def load(self, state: ExecutorState, at: int) -> None:
        """What is claimed is in slots, and others leave where there is no place."""
        assert state.limits
        there = state.residency.in_slots()
        coming = sorted(state.claimed() - set(there))
        idle = [digest for digest in there if digest not in state.claimed()]
        leaving = idle[: max(0, len(there) + len(coming) - state.limits.max_loras)]
        self.deltas[at] += 1
        added = [Copy(digest, Tier.SLOT, 0, 1, False) for digest in coming]
        assert state.moved(self.deltas[at], added, [(digest, Tier.SLOT) for digest in leaving], self.now)

    @rule(at=which, cordoned=st.booleans())
    def cordon(self, at: int, cordoned: bool) -> None:
        self.states[at].cordoned = cordoned

    @rule(at=which, on_trial=st.booleans())
    def try_out(self, at: int, on_trial: bool) -> None:
        self.states[at].on_trial = on_trial

    @rule(at=which, tripped=st.booleans(), half_open=st.booleans())
    def judge(self, at: int, tripped: bool, half_open: bool) -> None:
        self.states[at].tripped, self.states[at].half_open = tripped, tripped and half_open

    @rule(at=which, seats=st.sampled_from([None, 1, 5]))
    def limit(self, at: int, seats: int | None) -> None:
        self.states[at].seat_limit = seats

    @rule(at=which, digests=st.lists(st.sampled_from("uvwz"), max_size=1))
    def hear_of_others(self, at: int, digests: list[str]) -> None:
        self.others[at] = tuple((digest, self.now) for digest in digests)
        self.report(at)

    @rule(seconds=st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]))
    def tend(self, seconds: float) -> None:
        self.now += seconds
        self.fleet.queue.age(self.now)
        for notice in self.fleet.policy.tend(self.now):
            state = self.fleet.states[notice.address]
            told = self.told[self.states.index(state)]
            if notice.waiting_s:
                assert state.takes_requests
                told[notice.digest] = self.now - notice.waiting_s
            else:
                told.pop(notice.digest, None)
        for state, told in zip(self.states, self.told, strict=True):  # Slots are left free for them.
            assert state.takes_requests or not told
            assert all(map(self.fleet.queue.group_size, told))

    @invariant()
    def holds(self) -> None:
        queue = self.fleet.queue
        narrow = {state.name: state.num_running for state in self.fleet.states.values() if state.half_open}
        for placement in self.fleet.plan(self.now):
            assert placement.number not in self.running
            item = self.expected[placement.number]
            self.running[placement.number] = (placement.address, item)
            self.told[self.states.index(self.fleet.states[placement.address])].pop(item.digest, None)
        assert all(self.fleet.states[name].num_running <= ran + 1 for name, ran in narrow.items())
        waiting = {item.number: item for item in queue.requests()}
        assert not waiting.keys() & self.running.keys()
        assert waiting.keys() | self.running.keys() == self.expected.keys()
        for state, limits in zip(self.states, self.limits, strict=True):
            here = [item for name, item in self.running.values() if name == state.name]
            assert sorted(state.dispatch_ids()) == sorted(str(item.number) for item in here)
            assert len(here) <= limits.max_seats
            assert len({item.digest for item in here} - {""}) <= limits.max_loras
            assert all(limits.can_hold(item.max_rank, item.modules) for item in here)
            assert all(item.max_length <= limits.max_model_len for item in here)
            assert all(state.name not in item.refused for item in here)
        self.nothing_waits_that_could_run(waiting.values())

    def nothing_waits_that_could_run(self, waiting: "list[Waiting]") -> None:
        cold = self.fleet.policy.cold
        for position, state in enumerate(self.fleet.index.states):
            limits = state.limits
            kept = RESERVE if limits and limits.max_seats >= 8 else 0
            if limits is None or not state.takes_requests or state.free_seats <= kept:
                continue
            for item in waiting:
                fits = (
                    limits.can_hold(item.max_rank, item.modules) and item.max_length <= limits.max_model_len
                )
                barred = state.name in item.refused
                if not fits or barred or cold.closed(item.digest) >> position & 1:
                    continue
                held = cold.held >> position & 1
                assert item.digest and not state.claims(item.digest)
                assert not state.free_slots or held


TestPlanningMachine = PlanningMachine.TestCase
TestPlanningMachine.settings = settings(
    max_examples=int(os.environ.get("LORAFLEET_EXAMPLES", "40")), stateful_step_count=40
)
