"""`python -m scheduler.bench.estimates`: what each arrival's estimate costs, by what waits.

Times are of the CPU's clock: the mean of all arrivals, and the longest one, that draws anew what is drawn a
few times a second. A thousand arrivals come in a second. The collector of garbage is off.
"""

import argparse
import gc
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from lorafleet.bench.results import Results, head
from scheduler.bench.plan import MODULES, Case, House
from scheduler.dispatch.estimates.answers import Answers
from scheduler.dispatch.estimates.estimator import Estimator
from scheduler.dispatch.groups import Waiting
from scheduler.fleet.rates import Rates

CASES = (
    *(Case(10_000, 1_000, 1_000, executors) for executors in (10, 100, 1_000)),
    *(Case(10_000, tenants, 1_000, 1_000) for tenants in (1, 10)),
    Case(10_000, 2, 10_000, 1_000),
    Case(100, 1, 10, 10),
)
ARRIVALS = 4_000
INTERVAL_S = 0.001
RATES = Rates(token_interval=0.01, tokens=6_400, prompt_tokens=40_000, page_in=0.002, load=0.2)


def measure(case: Case) -> dict[str, object]:
    """One row."""
    house, answers, rng = House(case), Answers(), random.Random(3)
    for state in house.states:
        state.reported(replace(state.report, received=state.num_sent, rates=RATES))
    for number in range(max(20, case.tenants)):
        tenant, version = f"tenant-{number % case.tenants}", f"adapter-{number % case.adapters}"
        answers.ended(tenant, version, 200, 200, stopped=True)
    estimator = Estimator(house.queue, house.index, answers, prompt_token_price=0.5)
    arrivals = [_arrival(case, rng, number) for number in range(ARRIVALS)]
    estimator.estimate(arrivals[0], 200, 0.0)
    longest, known, began = 0.0, 0, time.process_time()
    for number, arrival in enumerate(arrivals):
        before = time.process_time()
        known += estimator.estimate(arrival, 200, number * INTERVAL_S) is not None
        longest = max(longest, time.process_time() - before)
    mean = (time.process_time() - began) / ARRIVALS
    return {
        **asdict(case),
        "estimated": known,
        "mean_us": round(mean * 1e6, 1),
        "longest_ms": round(longest * 1e3, 2),
    }


def _arrival(case: Case, rng: random.Random, number: int) -> Waiting:
    return Waiting(
        number=10**9 + number,
        tenant=f"tenant-{rng.randrange(case.tenants)}",
        digest=f"adapter-{rng.randrange(case.adapters)}",
        priority=0,
        cost=200,
        max_rank=16,
        modules=MODULES,
        max_length=1000,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scheduler.bench.estimates", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where rows go")
    args = parser.parse_args(arguments)
    gc.disable()
    results = Results(args.json, head("python -m scheduler.bench.estimates"))
    for case in CASES:
        results.add(measure(case))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
