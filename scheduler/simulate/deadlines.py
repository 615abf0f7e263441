"""`python -m scheduler.simulate.deadlines`: what it brings to refuse at once what would come too late.

Each seed is run twice, with the scheduler's gate and without: so it is known of each request that was refused
what would have become of it.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from lorafleet.bench.results import head, write
from lorafleet.bench.statistics import percentile
from scheduler.dispatch.estimates.answers import Answers
from scheduler.dispatch.estimates.estimator import Estimator
from scheduler.dispatch.estimates.gate import Expected, Gate
from scheduler.dispatch.groups import Waiting
from scheduler.errors import DeadlineUnreachable, QueueTooLong
from scheduler.simulate.report import rounded
from scheduler.simulate.requests import End, Record
from scheduler.simulate.run import Played, Row, play
from scheduler.simulate.scenario import Scenario
from scheduler.simulate.scenarios import SCENARIOS
from scheduler.simulate.scheduler import Scheduler, Watcher


class ByEstimate(Watcher):
    """The scheduler's own gate, before a fleet with one scheduler: to be passed to `play` as both gate and
    watcher."""

    def __init__(self, max_queue_s: float = math.inf) -> None:
        self._max_queue_s = max_queue_s
        self._gate: Gate | None = None
        self._expected: dict[int, Expected] = {}

    def __call__(self, scheduler: Scheduler, waiting: Waiting, record: Record) -> float | None:
        if self._gate is None:
            answers = Answers()
            estimator = Estimator(scheduler.queue, scheduler.index, answers, scheduler.prompt_token_price)
            self._gate = Gate(estimator, answers, self._max_queue_s, chance=lambda: 0.0)
        asked = record.asked
        try:
            expected = self._gate.expect(waiting, asked.output, asked.deadline_s, asked.at)
        except (DeadlineUnreachable, QueueTooLong) as refusal:
            return float(refusal.metadata["estimate_s"])
        if expected:
            self._expected[record.number] = expected
        return None

    @property
    def gate(self) -> Gate:
        if self._gate is None:
            raise ValueError("nobody came yet")
        return self._gate

    def left(self, waiting: Waiting) -> None:
        self.gate.left(waiting)

    def began(self, record: Record) -> None:
        if (expected := self._expected.get(record.number)) and record.first_at is not None:
            self.gate.began(expected, record.first_at)

    def ended(self, waiting: Waiting, record: Record) -> None:
        expected = self._expected.pop(record.number, None)
        if expected and record.ended_at is not None:
            self.gate.ended(expected, record.ended_at, late=record.end is End.MISSED)
        if record.end is End.ANSWERED:
            self.gate.answered(waiting, record.tokens, stopped=False)


def compare(scenario: Scenario, seed: int) -> Row:
    """One seed, with refusals and without: shares of 1, tokens a second, seconds. Measured are requests after
    which others came for as long as they had: then the line gets shorter than could be foreseen."""
    gate = ByEstimate()
    refusing, plain = play(scenario, seed=seed, gate=gate, watcher=gate), play(scenario, seed=seed)
    records, without = _measured(refusing), _measured(plain)
    refused = [each.number for each in records if each.end is End.REFUSED]
    late = sum(plain.scheduler.records[number].end is End.MISSED for number in refused)
    return {
        "scenario": scenario.name,
        "executors": scenario.executors,
        "adapters": scenario.adapters,
        "rate": scenario.rate,
        "seed": seed,
        "requests": len(records),
        "refused": len(refused),
        "refused_would_have_missed": rounded(late / len(refused) if refused else 1.0),
        "missed": sum(each.end is End.MISSED for each in records),
        "missed_without": sum(each.end is End.MISSED for each in without),
        "goodput_tokens_s": rounded(_goodput(scenario, records)),
        "goodput_tokens_s_without": rounded(_goodput(scenario, without)),
        "goodput_gain": _gain(_goodput(scenario, records), _goodput(scenario, without)),
        "ttft_p99_s": rounded(_ttft_p99(records)),
        "ttft_p99_s_without": rounded(_ttft_p99(without)),
    }


def _measured(played: Played) -> list[Record]:
    until = _until(played.scenario)
    return [each for each in played.measured if each.asked.at < until]


def _until(scenario: Scenario) -> float:
    patience = scenario.traffic.deadline_s if scenario.traffic else None
    if patience is None:
        raise ValueError(f"the callers of scenario {scenario.name!r} have no deadlines")
    return scenario.seconds - patience[1]


def _goodput(scenario: Scenario, records: Sequence[Record]) -> float:
    """Tokens a second of answers that came in time."""
    tokens = sum(each.tokens for each in records if each.end is End.ANSWERED)
    return tokens / (_until(scenario) - scenario.warm_s)


def _gain(goodput: float, without: float) -> float | None:
    """None where nobody is in time without."""
    return rounded(goodput / without) if without else None


def _ttft_p99(records: Sequence[Record]) -> float:
    return percentile(sorted(ttft for each in records if (ttft := each.ttft_s) is not None), 99)


def worst(rows: Sequence[Row]) -> Row:
    """The worst of each promise."""
    found: Row = {"scenario": rows[0]["scenario"], "rate": rows[0]["rate"]}
    for name in ("refused_would_have_missed", "goodput_gain"):
        found[name] = min((row[name] for row in rows if row[name] is not None), default=None)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scheduler.simulate.deadlines", description=__doc__)
    parser.add_argument("scenarios", nargs="*", default=["deadlines"], help="whose callers have deadlines")
    parser.add_argument("--seeds", type=int, default=5, help="(5)")
    parser.add_argument("--load", type=float, nargs="+", default=[1.0], help="times the scenario's rate (1)")
    parser.add_argument("--json", type=Path, help="where rows go")
    args = parser.parse_args(arguments)
    rows, worsts = list[Row](), list[Row]()
    for name in args.scenarios:
        for load in args.load:
            scenario = SCENARIOS[name].at_rate(SCENARIOS[name].rate * load)
            seen = [compare(scenario, seed) for seed in range(args.seeds)]
            rows += seen
            worsts.append(worst(seen))
            sys.stdout.write("".join(f"{row}\n" for row in (*seen, worsts[-1])))
            sys.stdout.flush()
    if args.json:
        told = head("python -m scheduler.simulate.deadlines")
        write(args.json, {**told, "worst": worsts, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
