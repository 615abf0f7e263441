"""The other end of `lorafleet plan`: hears a load, then fleets, and says what each does, by lines."""

import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from lorafleet.bench.results import say
from lorafleet.bench.statistics import percentile
from scheduler.simulate.adapters import digest_of
from scheduler.simulate.costs import Costs, UnknownCosts, read_costs
from scheduler.simulate.executors.settings import ExecutorSettings
from scheduler.simulate.requests import Asked, End
from scheduler.simulate.run import DRAIN_S, Played, play
from scheduler.simulate.scenario import Scenario

BLOCK_SIZE = 16


def main() -> int:
    """Says what is measured, hears a load, and answers for fleets until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Who asks ends this.
    say({"measured": [_described(name) for name in _names()]})
    world: World | None = None
    for line in sys.stdin:
        said = json.loads(line)
        try:
            if world is None:
                world = World.of(said)
            else:
                say({"outcome": world.outcome(said)})
        except UnknownCosts as error:
            say({"error": str(error)})
    return 0


@dataclass(frozen=True, slots=True)
class World:
    """What stays the same for all fleets."""

    costs: Costs
    asked: list[Asked]
    ranks: tuple[int, ...]  # By the adapters' numbers.
    executor: ExecutorSettings
    counted_from_s: float
    seed: int

    @classmethod
    def of(cls, question: Mapping[str, Any]) -> "World":
        """Raises UnknownCosts."""
        load = question["load"]
        asked = [
            Asked(at, "" if adapter is None else digest_of(adapter), prompt, output)
            for at, prompt, output, adapter in load["arrivals"]
        ]
        ranks = tuple(load["ranks"]) or (1,)
        executor = ExecutorSettings(
            seats=question["seats"],
            max_batched_tokens=question["step_tokens"],
            max_model_len=load["longest"],
            max_rank=max(ranks),
            block_size=BLOCK_SIZE,
        )
        costs = replace(read_costs(question["costs"]), rank_bytes=question["rank_bytes"])
        if rate := question["store_bytes_s"]:
            # Loads take what they do while all loaders are busy: each has its share of the rate.
            store = replace(costs.load.store, byte_s=executor.loader_threads / rate)
            costs = replace(costs, load=replace(costs.load, store=store))
        return cls(costs, asked, ranks, executor, question["counted_from_s"], question["seed"])

    def outcome(self, fleet: Mapping[str, Any]) -> Mapping[str, float]:
        """The outcome as lorafleet/plan/search.py has it."""
        scenario = Scenario(
            "plan",
            "a fleet of `lorafleet plan`",
            executors=fleet["executors"],
            adapters=len(self.ranks),
            ranks=self.ranks,
            executor=replace(
                self.executor,
                slots=fleet["slots"],
                kv_blocks=fleet["kv_tokens"] // BLOCK_SIZE,
                host_bytes=fleet["host_bytes"],
            ),
            seconds=self.asked[-1].at,
            warm_s=self.counted_from_s,
        )
        drain_s = DRAIN_S + self._longest_answer_s(fleet)
        return outcome_of(play(scenario, seed=self.seed, costs=self.costs, asked=self.asked, drain_s=drain_s))

    def _longest_answer_s(self, fleet: Mapping[str, Any]) -> float:
        """In an executor that is full."""
        seats, slots = self.executor.seats, fleet["slots"]
        used_rank = min(seats, slots) * self.executor.max_rank
        step_s = self.costs.seconds(seats, fleet["kv_tokens"], 0, used_rank, slots)
        return max(each.output for each in self.asked) * step_s


def outcome_of(played: Played) -> Mapping[str, float]:
    """Who had no first token counts as having waited for it until the end."""
    records, row = played.measured, played.row()
    firsts = sorted(
        played.ended_at - each.asked.at if each.ttft_s is None else each.ttft_s for each in records
    )
    token_s = sorted(seconds for each in records if (seconds := each.token_s) is not None)
    answered = sum(each.end is End.ANSWERED for each in records)
    return {
        "ttft_p50_s": percentile(firsts, 50),
        "ttft_p99_s": percentile(firsts, 99),
        "stream_tokens_s": 1 / percentile(token_s, 99) if token_s else 0.0,
        "tokens_s": row["tokens_s"],
        "page_ins_per_request": row["page_ins_per_request"],
        "failed": 1 - answered / len(records),
    }


def _names() -> list[str]:
    """The names of files of coefficients."""
    files = resources.files("scheduler.simulate.coefficients").iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def _described(name: str) -> Mapping[str, str]:
    costs = read_costs(name)
    return {"card": costs.card, "model": costs.model, "costs": name}


if __name__ == "__main__":
    raise SystemExit(main())
