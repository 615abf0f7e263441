"""`python -m scheduler.simulate.fair`: what a tenant at ten times its quota does to another one.

An honest tenant asks for half of what a fleet can do. It is alone, beside a hog at its quota, and beside one
at ten times that: which comes again after the delay that it was told, or at once, or has no quota at all, so
that weights alone share the fleet. Each seed is run in each of these ways with the same requests of the
honest one.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import product
from pathlib import Path
from typing import Any

from lorafleet.bench.lengths import Lengths
from lorafleet.bench.statistics import percentile
from scheduler.bench.about import about
from scheduler.simulate.adapters import digest_of
from scheduler.simulate.executors.settings import ExecutorSettings
from scheduler.simulate.report import rounded
from scheduler.simulate.requests import Asked, End, Record
from scheduler.simulate.run import Played, Row, play
from scheduler.simulate.scenario import Scenario
from scheduler.simulate.tenants import ByQuota, Retrying
from scheduler.simulate.traffic import Traffic, asked_of
from scheduler.tenants.limits import TenantLimits

HONEST, HOG = "honest", "hog"
TIMES = 10.0
ITS_ADAPTERS = 8  # The first ones are the honest tenant's, all others the hog's.

FLEET = Scenario(
    "fair",
    "Two executors of 64 seats and 32 slots, two tenants.",
    executors=2,
    adapters=64,
    executor=ExecutorSettings(seats=64, slots=32, host_bytes=20_000_000_000),
    seconds=60.0,
    warm_s=15.0,
    preloaded=True,
)
HALF = Traffic(32.0)  # Of what the fleet can do of such requests: 65 a second.


@dataclass(frozen=True, slots=True)
class Fair:
    """`hog` is its traffic at ten times its quota, which is in `limits`."""

    name: str
    about: str
    hog: Traffic
    limits: TenantLimits
    honest: Traffic = HALF
    fleet: Scenario = field(default_factory=lambda: FLEET)

    def asked(self, seed: int, times: float | None, honest: float = 1.0) -> list[Asked]:
        """`times` is how much the hog asks, in quotas; None: nothing. `honest`: the part of its traffic that
        the honest one asks."""
        light = replace(self.honest, rate=self.honest.rate * honest)
        of_honest = _of(HONEST, light, 0, ITS_ADAPTERS, self.fleet.seconds, seed)
        if times is None:
            return of_honest
        hogs = replace(self.hog, rate=self.hog.rate * times / TIMES)
        own = self.fleet.adapters - ITS_ADAPTERS
        hog = _of(HOG, hogs, ITS_ADAPTERS, own, self.fleet.seconds, seed + 1000)
        return list(merge(of_honest, hog, key=lambda each: each.at))


def _of(tenant: str, traffic: Traffic, first: int, adapters: int, seconds: float, seed: int) -> list[Asked]:
    drawn = asked_of(traffic, adapters, seconds, seed)
    numbers = {digest_of(number): digest_of(first + number) for number in range(adapters)}
    return [
        replace(each, tenant=tenant, digest=numbers[each.digest], request_id=f"{tenant}-{at}")
        for at, each in enumerate(drawn)
    ]


LONG_PROMPTS, LONG_ANSWERS = Lengths("uniform", 4000, 7000), Lengths("uniform", 800, 1600)
_REQUESTS = TenantLimits(requests_per_minute=200, burst_seconds=2)

SCENARIOS: Mapping[str, Fair] = {
    each.name: each
    for each in (
        Fair(
            "requests",
            "A twentieth of the fleet in requests like the honest tenant's.",
            Traffic(33.3),
            _REQUESTS,
        ),
        Fair(
            "many-adapters",
            "The same, by 56 adapters that are all equally hot: more than there are slots.",
            Traffic(33.3, popularity="uniform"),
            _REQUESTS,
        ),
        Fair("one-adapter", "The same, all of one adapter.", Traffic(33.3, popularity="one"), _REQUESTS),
        Fair(
            "bursts",
            "The same, in bursts of some tens at once.",
            Traffic(33.3, burstiness=0.03),
            _REQUESTS,
        ),
        Fair(
            "prompt-tokens",
            "Prompts of 4,000 to 7,000 tokens, of which it may have 60,000 a minute.",
            Traffic(1.82, prompt=LONG_PROMPTS),
            TenantLimits(prompt_tokens_per_minute=60_000, burst_seconds=10),
        ),
        Fair(
            "output-tokens",
            "Answers of 800 to 1,600 tokens, of which it may have 30,000 a minute.",
            Traffic(4.17, output=LONG_ANSWERS),
            TenantLimits(output_tokens_per_minute=30_000, burst_seconds=10),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Way:
    """`times`: how much the hog asks, in quotas; `honest`: of its traffic, how much the honest one asks.
    `pause_s`: the hog comes again after so long, whatever it was told; None: after what it was told. Without
    quotas the tenants share by weights alone."""

    times: float | None
    honest: float = 1.0
    has_quota: bool = True
    pause_s: float | None = None
    tries: int = 1000
    beside: str = "alone"  # What the honest tenant's times are compared with.


WAYS: Mapping[str, Way] = {
    "alone": Way(None),
    "at its quota": Way(1.0),
    "told": Way(TIMES),
    "at once": Way(TIMES, pause_s=0.1, tries=20),
    "no quota": Way(TIMES, has_quota=False),
    "light, alone": Way(None, honest=0.5),
    "light, no quota, twice": Way(2 * TIMES, honest=0.5, has_quota=False, beside="light, alone"),
}


def row_of(name: str, way: str, seed: int) -> Row:
    """Seconds, counts and shares of 1 of one seed."""
    fair, how = SCENARIOS[name], WAYS[way]
    gate = ByQuota({HOG: fair.limits} if how.has_quota else {})
    callers = Retrying(fair.fleet.seconds, seed, how.pause_s, how.tries)
    played = play(
        fair.fleet, seed=seed, asked=fair.asked(seed, how.times, how.honest), gate=gate, callers=callers
    )
    honest, hog = _measured(played, HONEST), _measured(played, HOG)
    row: Row = {"scenario": name, "way": way, "seed": seed, **_firsts(HONEST, honest)}
    row["honest_lost"] = sum(each.end is not End.ANSWERED for each in honest)
    if how.times is not None:
        row |= _firsts(HOG, hog) | _refused(hog)
        row["hog_of_its_quota"] = rounded(_of_quota(fair, hog))
    return row


def _measured(played: Played, tenant: str) -> list[Record]:
    return [each for each in played.measured if each.asked.tenant == tenant]


def _firsts(tenant: str, records: Sequence[Record]) -> Row:
    firsts = sorted(ttft for each in records if (ttft := each.ttft_s) is not None)
    return {
        f"{tenant}_requests": len({each.asked.request_id for each in records}),
        f"{tenant}_ttft_p50_s": rounded(percentile(firsts, 50)) if firsts else None,
        f"{tenant}_ttft_p99_s": rounded(percentile(firsts, 99)) if firsts else None,
    }


def _refused(records: Sequence[Record]) -> Row:
    """`retries_kept`: of those who came again, the share that was not refused once more."""
    again = [each for each in records if each.asked.tries]
    kept = sum(each.retry_after_s is None for each in again)
    return {
        "hog_answered": sum(each.end is End.ANSWERED for each in records),
        "refusals": sum(each.retry_after_s is not None for each in records),
        "retries": len(again),
        "retries_kept": rounded(kept / len(again)) if again else None,
    }


def _of_quota(fair: Fair, records: Sequence[Record]) -> float:
    """What was let in, in quotas of the measured time; a burst may come on top."""
    came_in = [each.asked for each in records if each.retry_after_s is None]
    spent = {
        "requests_per_minute": len(came_in),
        "prompt_tokens_per_minute": sum(each.prompt for each in came_in),
        "output_tokens_per_minute": sum(each.output for each in came_in),
    }
    minutes = (fair.fleet.seconds - fair.fleet.warm_s) / 60
    limits: dict[str, float] = {name: getattr(fair.limits, name) for name in spent}
    return max(spent[name] / (minutes * limit) for name, limit in limits.items() if limit)


def worst(rows: Sequence[Row]) -> list[Row]:
    """By scenario and way, the worst of all seeds, with the honest tenant's p99 in times of that of the same
    seed alone."""
    by = {(row["scenario"], row["way"], row["seed"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    found = []
    for name, way in dict.fromkeys((row["scenario"], row["way"]) for row in rows):
        seen = [by[name, way, seed] for seed in seeds]
        row: Row = {"scenario": name, "way": way}
        for key in seen[0].keys() - {"scenario", "way", "seed"}:
            values = [each[key] for each in seen if each[key] is not None]
            row[key] = (min if key == "retries_kept" else max)(values, default=None)
        alone = WAYS[way].beside
        if (name, alone, seeds[0]) in by:
            ratios = [_p99(each) / _p99(by[name, alone, each["seed"]]) for each in seen]
            row["p99_times_alone"] = rounded(max(ratios))
        found.append(row)
    return found


def _p99(row: Row) -> float:
    p99_s: float = row[f"{HONEST}_ttft_p99_s"]
    return p99_s


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scheduler.simulate.fair", description=__doc__)
    parser.add_argument("scenarios", nargs="*", default=[*SCENARIOS], help=", ".join(SCENARIOS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--seeds", type=int, default=5, help="(5)")
    parser.add_argument("--workers", type=int, default=1, help="processes (1)")
    parser.add_argument("--json", type=Path, help="where rows go")
    args = parser.parse_args(arguments)
    jobs = list(product(args.scenarios, args.ways, range(args.seeds)))
    with ProcessPoolExecutor(args.workers) as pool:
        rows = list(pool.map(row_of, *zip(*jobs, strict=True)))
    worsts = worst(rows)
    for row in worsts:
        sys.stdout.write(f"{row}\n")
    if args.json:
        told: dict[str, Any] = about("scheduler.simulate.fair")
        args.json.write_text(json.dumps({**told, "worst": worsts, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
