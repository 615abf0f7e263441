"""The scheduler's simulator in a process of its own: a load, then fleets, a JSON line each.

This package runs where no scheduler is installed, so it knows that process by its lines alone
(scheduler/simulate/answers.py has the other end).
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from types import TracebackType
from typing import IO, Any, Self

from lorafleet.bench.errors import BenchError
from lorafleet.plan.cards import same_card
from lorafleet.plan.load import Load
from lorafleet.plan.search import Fleet, Outcome

COMMAND = (sys.executable, "-m", "scheduler.simulate.answers")
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Measured:
    """A card and a model whose times are known; `costs` is what the simulator calls them."""

    card: str
    model: str
    costs: str


@dataclass(frozen=True, slots=True)
class Question:
    """What stays the same for all fleets. `rank_bytes`: of an adapter, for each of its ranks. Requests that
    come before `counted_from_s` are not counted."""

    costs: str
    load: Load
    rank_bytes: int
    store_bytes_s: int  # That an executor reads, all its loads together; 0: as measured.
    seats: int
    step_tokens: int
    counted_from_s: float
    seed: int


class Simulator:
    """`with Simulator() as simulator:`; its process ends with the block, whatever it does.

    Everything raises BenchError when the process cannot do it, with what it said last.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self.measured: Sequence[Measured] = ()
        self._command = command

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            self.measured = tuple(Measured(**each) for each in self._read()["measured"])
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def ask(self, question: Question) -> None:
        """Once, before fleets are run."""
        load = question.load
        numbers = {name: number for number, name in enumerate(load.ranks)}
        arrivals = [
            [each.at, each.prompt_tokens, each.output_tokens, numbers[each.adapter] if each.adapter else None]
            for each in load.arrivals
        ]
        self._write(
            {
                **{field.name: getattr(question, field.name) for field in fields(question)},
                "load": {"arrivals": arrivals, "ranks": list(load.ranks.values()), "longest": load.longest},
            }
        )

    def run(self, fleet: Fleet, kv_tokens: int) -> Outcome:
        """`kv_tokens`: what the KV cache of each executor holds."""
        self._write({**asdict(fleet), "kv_tokens": kv_tokens})
        return Outcome(**self._read()["outcome"])

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            writer = _pipe(self._process.stdin)
            writer.write(json.dumps(line) + "\n")
            writer.flush()
        except BrokenPipeError:
            raise self._lost() from None

    def _read(self) -> Mapping[str, Any]:
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise self._lost()
        said: Mapping[str, Any] = json.loads(line)
        if "error" in said:
            raise BenchError(str(said["error"]))
        return said

    def _lost(self) -> BenchError:
        """The error with its last words."""
        try:
            _, said = self._process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            said = ""
        last = (said.strip().splitlines() or ["it said nothing"])[-1]
        hint = "; it needs pip install 'lorafleet[scheduler]'" if "No module named" in last else ""
        return BenchError(f"the simulator ended: {last}{hint}")

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            _close(pipe)


def known_costs(measured: Sequence[Measured], card: str, models: Sequence[str]) -> str:
    """What the simulator calls the times of one of the models on a card. Raises BenchError, with the list of
    what is known."""
    for each in measured:
        if same_card(each.card, card) and each.model in models:
            return each.costs
    known = ", ".join(f"{each.model} on {each.card}" for each in measured) or "none"
    raise BenchError(
        f"--card {card}, --model {models[0]}: their times are not measured; known are: {known}. "
        f"scheduler/simulate/README.md says how to measure others"
    )


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise RuntimeError("the process was started without pipes")
    return pipe


def _close(pipe: IO[str] | None) -> None:
    if pipe:
        try:
            pipe.close()
        except BrokenPipeError:
            return  # What was buffered is for nobody.
