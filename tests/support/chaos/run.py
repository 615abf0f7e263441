"""Random traffic with known answers, while operators and failures change everything around it.

Everything draws from seeded generators; what falls together in time differs from run to run.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorafleet import Client, DataLoss, InternalError, InvalidRequest, LoraFleetError
from scheduler.text.tokenizer import Tokenizer
from tests.support.services.streams import LOOSE, undisturbed

NUM_TOKENS = 48
STALENESS_S = 1.0  # --alias-max-staleness
NAMES = ("n1", "n2", "n3")
SAMPLED: Mapping[str, Any] = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.2, "seed": 23}
NEVER = (InternalError, DataLoss, InvalidRequest)  # whatever happens around a request that is in order


@dataclass(frozen=True)
class Question:
    prompt: list[int]
    options: Mapping[str, Any]


QUESTIONS = (
    Question([30, 41, 52, 63, 74] * 4, {}),
    Question([30, 41, 52, 63, 74] * 6 + [99] * 7, {}),  # begins as the first one: blocks are shared
    Question([12, 23, 34, 45] * 16, {}),
    Question([30, 41, 52, 63, 74] * 4, SAMPLED),
)
# The tokens of each digest ("" is the base) for each question.
Truth = Mapping[tuple[str, int], tuple[int, ...]]


@dataclass
class Aliases:
    """Which digests each name could stand for, and when: spans of (digest, begin, end or None)."""

    spans: dict[str, list[list[Any]]] = field(default_factory=lambda: {name: [] for name in NAMES})

    def changing(self, name: str, digest: str) -> None:
        """Call it before a change that may happen, `changed` after one that did."""
        self.spans[name].append([digest, time.monotonic(), None])

    def changed(self, name: str, digest: str) -> None:
        now = time.monotonic()
        for span in self.spans[name]:
            if span[2] is None and span[0] != digest:
                span[2] = now

    def allow(self, name: str, digest: str, asked: float, answered: float) -> bool:
        return any(
            each == digest and began <= answered and (ended is None or asked <= ended + STALENESS_S)
            for each, began, ended in list(self.spans[name])
        )


@dataclass
class World:
    """What all threads share. All of `digests` are pushed under each of `names`."""

    addresses: Sequence[str]
    tokenizer: Tokenizer
    truth: Truth
    digests: Mapping[str, Path]  # of the adapters, with their folders
    aliases: Aliases
    ends_at: float
    problems: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    names: tuple[str, ...] = NAMES

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.ends_at and not self.problems

    def clients(self) -> list[Client]:
        """New ones, for a caller to close."""
        return [Client(address) for address in self.addresses]

    def failed(self, error: LoraFleetError, ref: str, asked_at: float, options: Mapping[str, Any]) -> None:
        """A question for `ref` ("" is the base) had no answer."""
        if isinstance(error, NEVER):
            self.problems.append(f"{ref}: {type(error).__name__} {error.reason}: {error}")
        self.outcomes[error.reason or error.code.name] += 1


def know(client: Client, folders: Sequence[Path]) -> tuple[dict[str, Path], Truth]:
    """The digests of the adapters, and every answer, asked for one after the other on a quiet fleet."""
    digests = {client.adapters.push(folder, "known").version.digest: folder for folder in folders}
    truth = {}
    for digest in ("", *digests):
        adapter = f"known@{digest}" if digest else None
        for number, question in enumerate(QUESTIONS):
            prompt, options = question.prompt, question.options
            answer = (
                client.generate(prompt, adapter=adapter, max_new_tokens=NUM_TOKENS, **LOOSE, **options)
                if options
                else undisturbed(client, prompt, NUM_TOKENS, adapter=adapter)
            )
            truth[digest, number] = answer.token_ids
    assert len({(number, tokens) for (_, number), tokens in truth.items()}) == len(truth)
    return digests, truth


def together(runs: Sequence[Callable[[], None]], patience_s: float, world: World) -> None:
    """All of them on threads of their own, until each has ended; one that does not is a problem."""

    def guarded(run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            world.problems.append(f"{run}: {error!r}")

    threads = [threading.Thread(target=guarded, args=(run,), daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, world.ends_at + patience_s - time.monotonic()))
    stuck = [run for run, thread in zip(runs, threads, strict=True) if thread.is_alive()]
    if stuck:
        world.problems.append(f"they never end: {stuck}")
