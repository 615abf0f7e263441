"""What a tenant at ten times its quota does to another's first tokens, with processes: `make fairness`.

Schedulers share a Redis, and executors only sleep. An honest tenant asks for half of what they can do; it is
alone, beside a hog that asks for its quota, a twentieth of the fleet, and beside one that asks for ten times
that: which comes again when it was told to, or at once, or has no quota at all. The ways take turns, each
with the same requests of the honest one, so that what the machine does at one time is in all of them.
tests/faults/test_fairness.py does a little of it.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from lorafleet.bench.results import head, say, write
from lorafleet.bench.statistics import percentile
from tests.support.adapters.peft import make_base
from tests.support.adapters.tokenizers import byte_level, write_folder
from tests.support.flood.asker import Attempt, Load
from tests.support.flood.flooders import NICE
from tests.support.flood.run import token_entry
from tests.support.services.cluster import ROOT, Cluster
from tests.support.stores.redis_server import RedisServer

MAX_TIMES_ALONE = 1.5
MIN_KEPT = 0.95
HONEST, HOG, FREE = "honest", "hog", "free"
EXECUTORS, SEATS, STEP_MS = 2, 32, 80
HONEST_RATE = 24.0  # Of 48 a second, with answers of 8 to 24 tokens.
QUOTA = 2.4  # A second.
BURST_S = 2.0
LEAD_S = 1.5  # For processes to start in.


@dataclass(frozen=True)
class Way:
    """`times`: how much the hog asks, in quotas; None: there is none. `pause_s` as in Load."""

    times: float | None
    pause_s: float | None = None
    tries: int = 1000
    has_quota: bool = True


ALONE, QUOTED, TOLD, AT_ONCE, NO_QUOTA = "alone", "at its quota", "told", "at once", "no quota"
WAYS: Mapping[str, Way] = {
    ALONE: Way(None),
    QUOTED: Way(1),
    TOLD: Way(10),
    AT_ONCE: Way(10, pause_s=0.1, tries=20),
    NO_QUOTA: Way(10, has_quota=False),
}


@dataclass(frozen=True)
class Seen:
    """One run of one way.

    firsts        seconds to the first tokens of the honest tenant, sorted
    problems      why others of its requests had no whole answer: must be empty
    hog_problems  the same of the hog's attempts, but for those that were refused
    let_in        of the hog's attempts; `allowed`: how many may be, by its quota
    retries_kept  of the hog's attempts that came again, those that were let in
    """

    way: str
    schedulers: int
    asked: int
    firsts: list[float]
    problems: dict[str, int]
    hog_asked: int
    hog_problems: dict[str, int]
    let_in: int
    allowed: float
    refusals: int
    retries: int
    retries_kept: int

    def faults(self) -> list[str]:
        """What must not be, whatever the machine does."""
        checks = {
            f"the honest tenant had {self.problems}": self.problems,
            f"the hog had {self.hog_problems}": self.hog_problems,
            f"{self.let_in} let in, of {self.allowed:.0f}": self.let_in > self.allowed,
        }
        return [text for text, wrong in checks.items() if wrong]

    def row(self) -> dict[str, Any]:
        told = {key: value for key, value in asdict(self).items() if key != "firsts"}
        return {**told, "allowed": round(self.allowed, 1), **_times(self.firsts)}


class Scene:
    """Real services; each run has a hog of its own, whose bucket is full."""

    def __init__(self, cluster: Cluster, schedulers: int, runs: int) -> None:
        tokens, limits = (cluster.folder / f"{name}-{schedulers}.toml" for name in ("tokens", "tenants"))
        names = [HONEST, *(f"{kind}-{number}" for kind in (HOG, FREE) for number in range(runs))]
        tokens.write_text("".join(token_entry(name, name) for name in names))
        unlimited = (f"[tenants.{name}]\nrequests_per_minute = 0\n" for name in names if HOG not in name)
        default = f"[default]\nrequests_per_minute = {60 * QUOTA}\nburst_seconds = {BURST_S}\n"
        limits.write_text(default + "".join(unlimited))
        seats = ("--max-seats", str(SEATS), "--max-lora-rank", "8")
        self._executors = [
            cluster.executor(f"executor-{schedulers}-{number}", *seats) for number in range(EXECUTORS)
        ]
        for node in self._executors:
            node.program = "executor.bench.paced"
            node.environment["STEP_MS"] = str(STEP_MS)
        files = ("--tokens-file", str(tokens), "--tenants-file", str(limits))
        self._schedulers = [
            cluster.scheduler(f"scheduler-{schedulers}-{number}", self._executors, *files)
            for number in range(schedulers)
        ]
        self._hogs = iter(range(runs))

    def __enter__(self) -> Self:
        nodes = [*self._executors, *self._schedulers]
        for node in nodes:
            node.start()
        for node in nodes:
            node.wait_ready()
        return self

    def __exit__(self, *error: object) -> None:
        for node in [*self._schedulers, *self._executors]:
            node.terminate()
        for node in [*self._schedulers, *self._executors]:
            node.stop()  # So that nobody shares the rates with them any more.

    async def run(self, name: str, seconds: float, seed: int) -> Seen:
        """Until all that was asked has ended."""
        way, number = WAYS[name], next(self._hogs)
        addresses = [node.address for node in self._schedulers]
        honest = Load(addresses, HONEST, HONEST_RATE, time.monotonic() + LEAD_S, seconds, seed)
        loads = [honest]
        if way.times is not None:
            hog = replace(
                honest, token=f"{HOG if way.has_quota else FREE}-{number}", rate=way.times * QUOTA, nice=NICE
            )
            loads.append(replace(hog, seed=seed + 1000, pause_s=way.pause_s, tries=way.tries))
        attempts, *of_hog = await asyncio.gather(*map(_asked, loads))
        return _seen(name, len(addresses), attempts, of_hog[0] if of_hog else [])


async def _asked(load: Load) -> list[Attempt]:
    """By a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.support.flood.asker"),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await process.communicate(json.dumps(asdict(load)).encode())
    assert process.returncode == 0, f"the asker ended with {process.returncode}"
    return [Attempt(**json.loads(line)) for line in told.splitlines()]


def _seen(name: str, schedulers: int, honest: Sequence[Attempt], hog: Sequence[Attempt]) -> Seen:
    let_in = [each for each in hog if each.first_s is not None]
    again = [each for each in hog if each.tries]
    lasted_s = max((each.came_s for each in let_in), default=0.0)
    # Of several schedulers each may let one more in, and a second's more while their parts change; and so
    # much for who is told to come again.
    allowed = QUOTA * (lasted_s + BURST_S + schedulers) + schedulers
    return Seen(
        name,
        schedulers,
        len(honest),
        sorted(each.first_s for each in honest if each.first_s is not None),
        _problems(honest),
        hog_asked=sum(not each.tries for each in hog),
        hog_problems=_problems(each for each in hog if each.reason != "REQUEST_RATE"),
        let_in=len(let_in),
        allowed=allowed if hog and WAYS[name].has_quota else float(len(hog)),
        refusals=sum(each.told_s is not None for each in hog),
        retries=len(again),
        retries_kept=sum(each.first_s is not None for each in again),
    )


def _problems(attempts: Iterable[Attempt]) -> dict[str, int]:
    return dict(Counter(each.reason or "not the right tokens" for each in attempts if not each.whole))


def _times(firsts: Sequence[float]) -> dict[str, float]:
    return {f"p{point}_ms": round(1000 * percentile(firsts, point), 1) for point in (50, 99)}


def summary(every: Sequence[Seen]) -> list[dict[str, Any]]:
    """By way and number of schedulers, all runs together, with what must not be."""
    together: dict[tuple[int, str], list[Seen]] = {}
    for seen in every:
        together.setdefault((seen.schedulers, seen.way), []).append(seen)
    return [_summed(way, runs, together[schedulers, ALONE]) for (schedulers, way), runs in together.items()]


def _summed(way: str, runs: Sequence[Seen], alone: Sequence[Seen]) -> dict[str, Any]:
    firsts = _firsts(runs)
    times_alone = percentile(firsts, 99) / percentile(_firsts(alone), 99)
    retries, kept = (sum(getattr(run, name) for run in runs) for name in ("retries", "retries_kept"))
    faults = [fault for run in runs for fault in run.faults()]
    if times_alone > MAX_TIMES_ALONE and WAYS[way].has_quota:
        faults.append(f"p99 is {times_alone:.2f} times what it is alone")
    if kept < MIN_KEPT * retries and WAYS[way].pause_s is None:
        faults.append(f"{kept} of {retries} who came when they were told to were let in")
    return {
        "way": way,
        "schedulers": runs[0].schedulers,
        "requests": len(firsts),
        **_times(firsts),
        "p99_times_alone": round(times_alone, 3),
        "let_in": sum(run.let_in for run in runs),
        "allowed": round(sum(run.allowed for run in runs), 1),
        "retries": retries,
        "retries_kept": round(kept / retries, 4) if retries else None,
        "faults": faults,
    }


def _firsts(runs: Sequence[Seen]) -> list[float]:
    return sorted(first for run in runs for first in run.firsts)


async def measured(cluster: Cluster, schedulers: int, ways: Sequence[str], seconds: float) -> list[Seen]:
    """The ways, one after the other; they may come more than once."""
    turns = Counter[str]()
    with Scene(cluster, schedulers, len(ways)) as scene:
        every = []
        for way in ways:
            every.append(await scene.run(way, seconds, seed=turns[way]))
            turns[way] += 1
            say(every[-1].row())
        return every


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.flood.fairness", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    parser.add_argument("--seconds", type=float, default=7, help="of each run (7)")
    parser.add_argument("--turns", type=int, default=3, help="that each way has (3), but without quotas: 1")
    parser.add_argument("--schedulers", type=int, nargs="+", default=[1, 2], help="how many (1 2)")
    args = parser.parse_args()
    ways = [*[way for way in WAYS if way != NO_QUOTA] * args.turns, NO_QUOTA]
    every: list[Seen] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_base(folder / "model", vocab_size=448, max_position_embeddings=4096)
        write_folder(model, byte_level())
        redis = stack.enter_context(RedisServer(folder / "redis"))
        cluster = stack.enter_context(Cluster(model, folder, store_url=redis.url))
        for schedulers in args.schedulers:
            every += asyncio.run(measured(cluster, schedulers, ways, args.seconds))
    summed = summary(every)
    for row in summed:
        say(row)
    rows = [each.row() for each in every]
    write(args.json, {**head("python -m tests.support.flood.fairness"), "summary": summed, "rows": rows})
    sys.exit(any(row["faults"] for row in summed))


if __name__ == "__main__":
    main()
