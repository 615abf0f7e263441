"""`python -m scheduler.simulate.moves`: how many adapters move when an executor joins or leaves.

An adapter's home is where its request goes while all executors are free and nobody has a copy. Requests for
all adapters are placed one by one, then an executor joins, or leaves, and they are placed again.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lorafleet.bench.results import Results, head
from scheduler.dispatch.groups import Waiting
from scheduler.dispatch.planning import Planning
from scheduler.dispatch.queue import Queue
from scheduler.fleet.index import FleetIndex
from scheduler.fleet.state import ExecutorState, Limits, Phase, Report
from scheduler.simulate.adapters import MODULES, digest_of
from scheduler.simulate.baselines import POLICIES

SEATS, SLOTS, RANK = 64, 16, 16
EVERY_S = 0.001  # Between two requests.
MOST = 1.2  # Of 1/N, that may move.


class Homes:
    """A fleet of free executors, and where it sends requests."""

    def __init__(self, policy: str, executors: int, seed: int) -> None:
        """Another seed has other executors and adapters, by name."""
        self._seed = seed
        self._queue = Queue(1 << 20, 1 << 20)
        self._index = FleetIndex([_executor(seed, number) for number in range(executors)])
        self._planning = Planning(self._queue, POLICIES[policy](self._queue, self._index, 2.0, seed))
        self._asked = 0

    def join(self) -> None:
        self._index.join(_executor(self._seed, len(self._index.states)))

    def leave(self) -> None:
        """The first one."""
        self._index.leave(0)

    def of(self, adapters: int) -> list[str]:
        """The homes by adapter, the name of its executor."""
        first = self._seed * adapters
        return [self._place(digest_of(first + number)) for number in range(adapters)]

    def _place(self, digest: str) -> str:
        self._asked += 1
        now = self._asked * EVERY_S
        self._planning.arrive(
            Waiting(self._asked, "tenant", digest, 0, 100, RANK, MODULES, max_length=200, arrived=now)
        )
        placement = self._planning.next(now)
        if placement is None:
            raise RuntimeError(f"no executor takes {digest}, though all are free")
        self._planning.take(placement)
        [state] = [each for each in self._index.states if each.name == placement.address]
        state.sent(str(self._asked), digest, now, "tenant")
        state.ended(str(self._asked), now)
        state.reported(Report(SEATS, SLOTS, received=state.num_sent))
        return placement.address


def moves(policy: str, executors: int, adapters: int, seed: int) -> list[dict[str, Any]]:
    """A row for a join and one for a leave, of one among so many executors; `most` is what may move."""
    rows = []
    for kind in ("join", "leave"):
        homes = Homes(policy, executors - (kind == "join"), seed)
        before = homes.of(adapters)
        homes.join() if kind == "join" else homes.leave()
        after = homes.of(adapters)
        moved = sum(old != new for old, new in zip(before, after, strict=True)) / adapters
        rows.append(
            {
                "scenario": f"homes-{kind}",
                "policy": policy,
                "executors": executors,
                "adapters": adapters,
                "slots": SLOTS,
                "seed": seed,
                "moved": round(moved, 4),
                "most": round(MOST / executors, 4),
            }
        )
    return rows


def _executor(seed: int, number: int) -> ExecutorState:
    state = ExecutorState(f"fleet-{seed}-executor-{number}", Phase.READY)
    state.limits = Limits(8192, RANK, MODULES, SLOTS, SEATS)
    state.reported(Report(SEATS, SLOTS))
    return state


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scheduler.simulate.moves", description=__doc__)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["production"], metavar="POLICY")
    parser.add_argument(
        "--executors", type=int, nargs="+", default=[8, 32], help="of one joins or leaves (8 32)"
    )
    parser.add_argument("--adapters", type=int, default=10_000, help="(10000)")
    parser.add_argument("--seeds", type=int, default=5, help="(5)")
    parser.add_argument("--json", type=Path, required=True, help="where rows go")
    args = parser.parse_args(arguments)
    results = Results(args.json, head("python -m scheduler.simulate.moves"))
    for policy in args.policies:
        for executors in args.executors:
            for seed in range(args.seeds):
                for row in moves(policy, executors, args.adapters, seed):
                    results.add(row)


if __name__ == "__main__":
    main()
