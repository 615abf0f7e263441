"""Runs one scenario, and measures what became of its requests."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from random import Random
from typing import Any, Protocol

from lorafleet.bench.popularity import choose
from lorafleet.bench.statistics import percentile
from scheduler.simulate.adapters import Catalog, digest_of
from scheduler.simulate.baselines import POLICIES
from scheduler.simulate.clock import Clock
from scheduler.simulate.costs import Costs, read_costs
from scheduler.simulate.executors.executor import Executor
from scheduler.simulate.report import rounded
from scheduler.simulate.requests import Asked, End, Record
from scheduler.simulate.scenario import ALL_RESIDENT, Scenario
from scheduler.simulate.scheduler import Gate, Scheduler, Watcher, no_gate
from scheduler.simulate.traffic import Sessions, asked_of

Row = dict[str, Any]


class Callers(Protocol):
    """Those who ask, and what they do about a refusal."""

    def again(self, record: Record, now: float) -> Asked | None:
        """Told of each request that has ended: when it comes again, if it does."""


DRAIN_S = 120.0  # After the last arrival, for those that have not ended.


@dataclass(slots=True)
class Played:
    """What happened. Records that arrived from `warm_s` on are measured."""

    scenario: Scenario
    policy: str
    seed: int
    schedulers: list[Scheduler]
    executors: list[Executor]
    ended_at: float
    page_ins: int  # From `warm_s` on, as the next one.
    loads: int

    @property
    def scheduler(self) -> Scheduler:
        """The first one, mostly the only one."""
        return self.schedulers[0]

    @property
    def records(self) -> list[Record]:
        """The records of all schedulers, in order of time."""
        every = [record for scheduler in self.schedulers for record in scheduler.records]
        return sorted(every, key=lambda record: record.asked.at)

    @property
    def measured(self) -> list[Record]:
        return [each for each in self.records if each.asked.at >= self.scenario.warm_s]

    def row(self) -> Row:
        """Plain values, as they are committed; None where nothing was answered."""
        scenario, records = self.scenario, self.measured
        answered = [each for each in records if each.end is End.ANSWERED]
        firsts = sorted(ttft for each in records if (ttft := each.ttft_s) is not None)
        token_s = [seconds for each in answered if (seconds := each.token_s) is not None]
        seconds = scenario.seconds - scenario.warm_s
        in_time = sum(each.tokens for each in answered if (each.ended_at or 0.0) <= scenario.seconds)
        row: Row = {
            "scenario": scenario.name,
            "policy": self.policy,
            "executors": scenario.executors,
            "adapters": scenario.adapters,
            "slots": scenario.executor.slots,
            "rate": scenario.rate,
            "seed": self.seed,
            "ttft_p50_s": rounded(percentile(firsts, 50)) if firsts else None,
            "ttft_p99_s": rounded(percentile(firsts, 99)) if firsts else None,
            "tokens_s": rounded(self._tokens_within() / seconds),
            "page_ins_per_request": rounded(self.page_ins / max(1, len(records))),
            "token_ms_p50": rounded(1000 * statistics.median(token_s)) if token_s else None,
            "requests": len(records),
            "goodput_tokens_s": rounded(in_time / seconds),
            "loads_per_request": rounded(self.loads / max(1, len(records))),
        }
        row |= {end.value: sum(each.end is end for each in records) for end in End}
        if scenario.sessions:
            row["next_turns_kept"] = rounded(kept_turns(records))
        return row

    def _tokens_within(self) -> float:
        """Tokens of answers between `warm_s` and the last arrival, as if each came at a steady pace."""
        begins, ends = self.scenario.warm_s, self.scenario.seconds
        return sum(_tokens_between(each, begins, ends) for each in self.records)


def play(
    scenario: Scenario,
    policy: str = "production",
    seed: int = 0,
    *,
    costs: Costs | None = None,
    gate: Gate = no_gate,
    watcher: Watcher | None = None,
    callers: Callers | None = None,
    single_steps: bool = False,
    asked: list[Asked] | None = None,
    preload: Sequence[str] = (),
    drain_s: float = DRAIN_S,
) -> Played:
    """Runs it to the end of all answers. `asked`: in place of what its traffic draws. `preload`: adapters
    that each executor begins with, in place of the scenario's. The policy "all-resident" is the scheduler's
    own where all adapters have a slot on each executor. `callers` may ask again. `drain_s` after its end
    nobody waits any more."""
    costs = costs or read_costs()
    if policy == ALL_RESIDENT:
        scenario = scenario.all_resident(costs.rank_bytes)
    clock = Clock()
    catalog = Catalog.of(scenario.adapters, scenario.ranks, costs.rank_bytes)
    executors = [
        Executor(clock, name, scenario.executor, costs, catalog, single_steps=single_steps)
        for name in scenario.names
    ]
    for executor in executors:
        executor.preload(preload or (catalog.ranks if scenario.preloaded else ()))
    turns = _Turns(clock, scenario, seed)

    def ended(record: Record) -> None:
        turns.ended(record)
        if callers and (again := callers.again(record, clock.now)):
            clock.at(again.at, turns.ask, again)

    schedulers = [
        Scheduler(
            clock,
            executors,
            catalog,
            POLICIES["production" if policy == ALL_RESIDENT else policy],
            settings=scenario.dispatcher,
            link_s=costs.link_s,
            salt=seed + number,
            late=frozenset(change.name for change in scenario.changes if change.kind == "join"),
            gate=gate,
            watcher=watcher,
            on_end=ended,
            name=f"scheduler-{number}",
        )
        for number in range(scenario.schedulers)
    ]
    doors = cycle(schedulers)
    turns.doors = doors
    _arrive(clock, doors, iter(_asked(scenario, seed) if asked is None else asked))
    if scenario.sessions:
        turns.begin(scenario.sessions)
    for change in scenario.changes:
        for scheduler in schedulers:
            act = {"join": scheduler.join, "leave": scheduler.leave, "lose": scheduler.lose}[change.kind]
            clock.at(change.at, act, change.name)
    clock.run(scenario.warm_s)
    page_ins, loads = _counts(executors)
    clock.run(scenario.seconds)
    until = scenario.seconds + drain_s
    while any(scheduler.num_live for scheduler in schedulers) and clock.now < until:
        clock.run(clock.now + 1.0)
    all_page_ins, all_loads = _counts(executors)
    return Played(
        scenario, policy, seed, schedulers, executors, clock.now, all_page_ins - page_ins, all_loads - loads
    )


def worst(rows: list[Row]) -> Row:
    """The worst of rows of several seeds: of each figure the worst, `seed` -1."""
    low = ("tokens_s", "goodput_tokens_s", "next_turns_kept", "answered")
    whole: Row = dict(rows[0])
    for key, value in rows[0].items():
        if isinstance(value, int | float) and key not in ("executors", "adapters", "slots", "rate"):
            values = [row[key] for row in rows if row[key] is not None]
            whole[key] = min(values) if key in low else max(values)
    return whole | {"seed": -1}


def kept_turns(records: list[Record]) -> float:
    """Kept turns: of turns that follow another one of their session, the share that ran where that did."""
    last: dict[str, str] = {}
    kept = following = 0
    for record in records:
        session, executor = record.asked.session, record.executor
        if not session or not executor:
            continue
        if session in last:
            following += 1
            kept += last[session] == executor
        last[session] = executor
    return kept / following if following else 0.0


def _asked(scenario: Scenario, seed: int) -> list[Asked]:
    if scenario.traffic is None:
        return []
    return asked_of(scenario.traffic, scenario.adapters, scenario.seconds, seed)


def _arrive(clock: Clock, doors: Iterator[Scheduler], coming: Iterator[Asked]) -> None:
    """One event at a time: there may be hundreds of thousands."""
    if asked := next(coming, None):

        def arrives() -> None:
            next(doors).ask(asked)
            _arrive(clock, doors, coming)

        clock.at(asked.at, arrives)


def _counts(executors: list[Executor]) -> tuple[int, int]:
    return sum(each.num_page_ins for each in executors), sum(each.num_loads for each in executors)


def _tokens_between(record: Record, begins: float, ends: float) -> float:
    first, last = record.first_at, record.ended_at
    if first is None or last is None or not record.tokens:
        return 0.0
    if last <= first:
        return record.tokens if begins <= first <= ends else 0.0
    share = (min(last, ends) - max(first, begins)) / (last - first)
    return record.tokens * max(0.0, share)


class _Turns:
    """Asks the next turn of a session when the last one has ended."""

    doors: Iterator[Scheduler]

    def __init__(self, clock: Clock, scenario: Scenario, seed: int) -> None:
        self._clock = clock
        self._until = scenario.seconds
        self._adapters = scenario.adapters
        self._rng = Random(f"{seed} sessions")
        self._sessions: Sessions | None = scenario.sessions
        self._begun = 0
        self._turn: dict[str, int] = {}

    def begin(self, sessions: Sessions) -> None:
        for _ in range(sessions.at_once):
            self._begin(self._rng.uniform(0.0, 2 * sessions.pause_s))

    def _begin(self, at: float) -> None:
        sessions = self._sessions
        if sessions is None or at >= self._until:
            return
        [adapter] = choose(sessions.popularity, 1, self._adapters, self._rng)
        self._begun += 1
        name = f"session-{self._begun}"
        self._turn[name] = 1
        digest = "" if adapter is None else digest_of(adapter)
        first = Asked(
            at, digest, sessions.said.draw(self._rng), sessions.output.draw(self._rng), session=name
        )
        self._clock.at(at, self.ask, first)

    def ask(self, asked: Asked) -> None:
        next(self.doors).ask(asked)

    def ended(self, record: Record) -> None:
        sessions, asked = self._sessions, record.asked
        if sessions is None or not asked.session:
            return
        at = self._clock.now + self._rng.expovariate(1 / sessions.pause_s)
        if record.end is not End.ANSWERED or self._turn[asked.session] >= sessions.turns:
            del self._turn[asked.session]
            self._begin(at)
            return
        if at >= self._until:
            return
        self._turn[asked.session] += 1
        said = asked.prompt + record.tokens
        more = sessions.said.draw(self._rng)
        following = replace(
            asked, at=at, prompt=said + more, output=sessions.output.draw(self._rng), shared=said
        )
        self._clock.at(at, self.ask, following)
