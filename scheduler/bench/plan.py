"""`python -m scheduler.bench.plan`: what a plan costs, by what waits and by what it places.

Each time is the median of some rounds on the CPU's clock, of the policy's calls with `Queue.take` and
`ExecutorState.sent` for each placement. Before a round each of `reports` executors has reported.
"""

import argparse
import gc
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lorafleet.bench.results import Results, head
from scheduler.dispatch.groups import Waiting
from scheduler.dispatch.policy import Policy
from scheduler.dispatch.queue import Queue
from scheduler.fleet.index import FleetIndex
from scheduler.fleet.residency import Copy, Residency, Tier
from scheduler.fleet.state import ExecutorState, Limits, Phase, Report

SLOTS, SEATS = 16, 64
MODULES = frozenset({"q_proj", "v_proj"})
ROUNDS = 15


@dataclass(frozen=True, slots=True)
class Case:
    """`waiting` requests, spread over tenants and adapters, before executors without a free seat or slot."""

    waiting: int
    tenants: int
    adapters: int
    executors: int
    hot: bool = True  # Else nobody waits for a version that runs.
    reserve: int = 0


CASES = (
    *(Case(10_000, 1_000, 1_000, executors) for executors in (10, 100, 1_000)),
    Case(10_000, 1_000, 1_000, 100, reserve=1),
    *(Case(10_000, tenants, 1_000, 100) for tenants in (1, 10)),
    Case(10_000, 2, 10_000, 100),
    Case(10_000, 10_000, 10_000, 100, hot=False),
    Case(10_000, 1_000, 1_000, 100, hot=False),
    Case(10_000, 1_000, 1_000, 1_000, hot=False),
)
PLACED = (0, 80, 800)


class House:
    """Full executors, and a queue that waits for them."""

    def __init__(self, case: Case) -> None:
        self._random = random.Random(7)
        self._case = case
        self.queue = Queue(1 << 20, 1 << 20)
        self._running: list[list[tuple[str, str]]] = []  # By executor: (dispatch id, digest).
        self.states = [self._executor(number) for number in range(case.executors)]
        self._positions = {state.address: at for at, state in enumerate(self.states)}
        self.index = FleetIndex(self.states, case.reserve)
        self.policy = Policy(self.queue, self.index, aging_s=2.0)
        self._numbers = iter(range(1 << 30))
        self._taken: list[tuple[int, str, Waiting]] = []  # (position, dispatch id, request)
        for _ in range(case.waiting):
            self.arrive()

    def _executor(self, number: int) -> ExecutorState:
        state = ExecutorState(f"executor-{number}:50061", Phase.READY)
        state.limits = Limits(8192, 16, MODULES, SLOTS, SEATS)
        kind = "adapter" if self._case.hot else "other"
        digests = [f"{kind}-{n % self._case.adapters}" for n in range(SLOTS * number, SLOTS * (number + 1))]
        state.residency = Residency.from_snapshot(0, [Copy(d, Tier.SLOT, 0, 1, False) for d in digests])
        for seat in range(SEATS):
            tenant = f"tenant-{(number * SEATS + seat) % self._case.tenants}"
            state.sent(f"{number}-{seat}", digests[seat % SLOTS], 0.0, tenant)
        self._running.append([(f"{number}-{seat}", digests[seat % SLOTS]) for seat in range(SEATS)])
        state.reported(Report(received=SEATS))
        return state

    def arrive(self) -> None:
        number, case = next(self._numbers), self._case
        request = Waiting(
            number=number,
            tenant=f"tenant-{number % case.tenants}",
            digest=f"adapter-{number * 7919 % case.adapters}",
            priority=0,
            cost=200,
            max_rank=16,
            modules=MODULES,
            max_length=1000,
        )
        self.queue.add(request)

    def refill(self) -> None:
        """Lets as many come as were placed, for the same versions."""
        for at, dispatch_id, taken in self._taken:
            self._running[at].append((dispatch_id, taken.digest))
            self.queue.add(replace(taken, number=next(self._numbers)))
        self._taken.clear()

    def free(self, seats: int) -> int:
        """Ends as many requests, as evenly as it goes. How many executors reported."""
        reporting = min(seats, len(self.states))
        for at in range(reporting):
            state = self.states[at]
            ended = seats // reporting + (at < seats % reporting)
            for _ in range(ended):
                self._end_one(at, state)
            self._report(state, free_seats=ended)
        return reporting

    def _end_one(self, at: int, state: ExecutorState) -> None:
        """Ends a request of a version that goes on running there."""
        running = self._running[at]
        while True:
            pick = self._random.randrange(len(running))
            dispatch_id, digest = running[pick]
            if state.claims(digest) > 1:
                running[pick] = running[-1]
                running.pop()
                state.ended(dispatch_id)
                return

    def report_all(self) -> None:
        for state in self.states:
            self._report(state, free_seats=0)

    def _report(self, state: ExecutorState, free_seats: int) -> None:
        state.reported(Report(free_seats=free_seats, received=state.num_sent))

    def plan(self) -> int:
        """Places what can be placed. How many there were."""
        before = len(self._taken)
        while (placement := self.policy.next(0.0)) or self.policy.has_more:
            if placement is None:
                continue
            request = self.queue.take(placement.number, placement.address if self.policy.in_turn else "")
            at, dispatch_id = self._positions[placement.address], f"r{placement.number}"
            self.states[at].sent(dispatch_id, request.digest, 0.0, request.tenant)
            self._taken.append((at, dispatch_id, request))
        return len(self._taken) - before


def measure(case: Case, rounds: int = ROUNDS) -> Iterator[dict[str, Any]]:
    """One row for each number of placements that the case can have."""
    house = House(case)
    first_ms = 1000 * _timed(house.plan)[0]
    about = {
        "waiting": case.waiting,
        "tenants": case.tenants,
        "adapters": case.adapters,
        "executors": case.executors,
        "hot": case.hot,
        "reserve": case.reserve,
    }
    empty_us = 1e6 * statistics.median(_timed(house.plan)[0] for _ in range(100))
    yield {**about, "reports": 0, "placed": 0, "ms": empty_us / 1000, "first_ms": first_ms}
    for wanted in PLACED if case.hot else (0,):
        if wanted > case.executors * SEATS:
            continue
        rows = [_round(house, wanted) for _ in range(rounds)]
        if not case.reserve and any(placed != wanted for _, placed, _ in rows):
            raise RuntimeError(
                f"{wanted} seats were free, and {[placed for _, placed, _ in rows]} were taken"
            )
        yield {**about, "reports": rows[0][2], "placed": round(statistics.mean(row[1] for row in rows))} | {
            "ms": statistics.median(ms for ms, _, _ in rows),
            "worst_ms": max(ms for ms, _, _ in rows),
        }


def _round(house: House, wanted: int) -> tuple[float, int, int]:
    """(ms, placed, executors that reported)"""
    house.refill()
    house.plan()
    gc.collect()  # What the cases before have left is not this one's.
    if wanted:
        reports = house.free(wanted)
    else:
        house.report_all()
        reports = len(house.states)
    seconds, placed = _timed(house.plan)
    house.queue.age(0.0)
    return 1000 * seconds, placed, reports


def _timed(plan: Any) -> tuple[float, int]:
    start = time.process_time()
    placed = plan()
    return time.process_time() - start, placed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scheduler.bench.plan", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    args = parser.parse_args(arguments)
    results = Results(args.json, head("python -m scheduler.bench.plan"))
    for case in CASES:
        for row in measure(case):
            row["load_average"] = os.getloadavg()[0]
            results.add(
                {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
            )


if __name__ == "__main__":
    main()
