"""`python -m scheduler.simulate.fair`: what a tenant at ten times its quota does to another one.

An honest tenant asks for half of what a fleet can do. It is alone, asks for a tenth more itself, is beside a
hog at its quota, and beside one at ten times that: which comes again after the delay that it was told, or at
once, or has no quota at all, so that weights alone share the fleet. Each seed is run in each of these ways
with the same requests of the honest one.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import chain, product
from pathlib import Path

from lorafleet.bench.lengths import Lengths
from lorafleet.bench.results import head, write
from lorafleet.bench.statistics import percentile
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
NOBODY = "nobody"  # In place of a scenario, where there is no hog.
TIMES = 10.0
ITS_ADAPTERS = 8  # The first ones are the honest tenant's, all others the hog's.

FLEET = Scenario(
    "fair",
    "Two executors of 64 seats and 32 slots, two tenants.",
    executors=2,
    adapters=64,
    executor=ExecutorSettings(seats=64, slots=32, host_bytes=20_000_000_000),
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
AS_MUCH_MORE = 1 + 200 / 60 / HALF.rate  # As the hog's quota is, where it asks for what the honest one does.

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
    quotas the tenants share by weights alone. It takes `seconds`, the fleet's first ones included."""

    times: float | None
    honest: float = 1.0
    has_quota: bool = True
    pause_s: float | None = None
    tries: int = 1000
    seconds: float = 225.0
    beside: str = "alone"  # What the honest tenant's times are compared with.


_SOON_S = 60.0  # What has no quota waits ever longer.

WAYS: Mapping[str, Way] = {
    "alone": Way(None),
    "alone, as much more": Way(None, honest=AS_MUCH_MORE),
    "light, alone": Way(None, honest=0.5),
    "at its quota": Way(1.0),
    "told": Way(TIMES),
    "at once": Way(TIMES, pause_s=0.1, tries=20),
    "no quota": Way(TIMES, has_quota=False, seconds=_SOON_S),
    "light, no quota, twice": Way(
        2 * TIMES, honest=0.5, has_quota=False, seconds=_SOON_S, beside="light, alone"
    ),
}


@dataclass(frozen=True, slots=True)
class Seen:
    """What one seed has: seconds, counts and shares of 1, and each first token of the honest tenant."""

    row: Row
    firsts: list[float]


def seen_of(name: str, way: str, seed: int) -> Seen:
    """`name` is a scenario, or NOBODY in ways without a hog."""
    how = WAYS[way]
    fair = SCENARIOS["requests" if name == NOBODY else name]
    fair = replace(fair, fleet=replace(fair.fleet, seconds=how.seconds))
    gate = ByQuota({HOG: fair.limits} if how.has_quota else {})
    callers = Retrying(fair.fleet.seconds, seed, how.pause_s, how.tries)
    played = play(
        fair.fleet, seed=seed, asked=fair.asked(seed, how.times, how.honest), gate=gate, callers=callers
    )
    honest, hog = _measured(played, HONEST), _measured(played, HOG)
    row: Row = {"scenario": name, "way": way, "seed": seed, **_times(HONEST, honest)}
    row["honest_lost"] = sum(each.end is not End.ANSWERED for each in honest)
    if how.times is not None:
        row |= _times(HOG, hog) | _refused(hog)
        row["hog_of_its_quota"] = rounded(_of_quota(fair, hog))
    return Seen(row, _firsts(honest))


def _measured(played: Played, tenant: str) -> list[Record]:
    return [each for each in played.measured if each.asked.tenant == tenant]


def _firsts(records: Sequence[Record]) -> list[float]:
    return sorted(ttft for each in records if (ttft := each.ttft_s) is not None)


def _times(tenant: str, records: Sequence[Record]) -> Row:
    firsts = _firsts(records)
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


def summary(every: Sequence[Seen]) -> list[Row]:
    """Rows by scenario and way the worst of all seeds, and in times of what it is without the hog the honest
    tenant's p99 of all seeds together, and the worst one of a seed."""
    by: dict[tuple[str, str], list[Seen]] = {}
    for seen in every:
        by.setdefault((seen.row["scenario"], seen.row["way"]), []).append(seen)
    found = []
    for (name, way), seeds in by.items():
        row: Row = {"scenario": name, "way": way}
        for key in [key for key in seeds[0].row if key not in ("scenario", "way", "seed")]:
            values = [each.row[key] for each in seeds if each.row[key] is not None]
            row[key] = (min if key == "retries_kept" else max)(values, default=None)
        if beside := by.get((NOBODY, WAYS[way].beside)):
            ratios = [_p99(one.firsts) / _p99(other.firsts) for one, other in zip(seeds, beside, strict=True)]
            row["p99_times_alone"] = rounded(_p99(_together(seeds)) / _p99(_together(beside)))
            row["p99_times_alone_worst"] = rounded(max(ratios))
        found.append(row)
    return found


def _together(seeds: Sequence[Seen]) -> list[float]:
    return sorted(chain.from_iterable(each.firsts for each in seeds))


def _p99(firsts: Sequence[float]) -> float:
    return percentile(firsts, 99)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scheduler.simulate.fair", description=__doc__)
    parser.add_argument("scenarios", nargs="*", default=[*SCENARIOS], help=", ".join(SCENARIOS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--seeds", type=int, default=5, help="(5)")
    parser.add_argument("--workers", type=int, default=1, help="processes (1)")
    parser.add_argument("--json", type=Path, help="where rows go")
    args = parser.parse_args(arguments)
    without = [way for way in args.ways if WAYS[way].times is None]
    beside = [way for way in args.ways if WAYS[way].times is not None]
    seeds = range(args.seeds)
    jobs = [*product([NOBODY], without, seeds), *product(args.scenarios, beside, seeds)]
    with ProcessPoolExecutor(args.workers) as pool:
        every = list(pool.map(seen_of, *zip(*jobs, strict=True)))
    summed = summary(every)
    for row in summed:
        sys.stdout.write(f"{row}\n")
    if args.json:
        rows = [each.row for each in every]
        write(args.json, {**head("python -m scheduler.simulate.fair"), "summary": summed, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
