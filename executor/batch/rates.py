"""How fast this executor is: what schedulers estimate waits from. Pure: times are measured elsewhere.

Sums of tokens and of seconds decay together, by the seconds that steps take: an executor that idles goes on
telling what it last was. Adapters' times decay by their number.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from executor.batch.sequence import Sequence

MEMORY_S = 2.0  # Seconds of steps after which they count a third.
KEPT_OF_LOADS = 0.8  # A load counts so much of the next one.
# In a step: with fewer, most of its time is that of the weights, which would be read anyway, and tells
# nothing of how fast a long prompt is.
MANY_PROMPT_TOKENS = 256
RECOUNT_S = 0.2  # What is left is counted so often: that is a look at every sequence.


@dataclass(frozen=True, slots=True)
class Rates:
    """0 is unknown, but for what is left. Times are in seconds.

    token_interval: from one token of a sequence to its next. tokens, prompt_tokens: a second; of prompts in
    steps that have many, and unknown until one has. prompt_tokens_left: to be computed before the next
    tokens. answer_tokens_left: that may follow, at most. page_in: from host memory into a slot. load: from
    the store or disk into host memory.
    """

    token_interval: float = 0.0
    tokens: float = 0.0
    prompt_tokens: float = 0.0
    prompt_tokens_left: int = 0
    answer_tokens_left: int = 0
    page_in: float = 0.0
    load: float = 0.0


UNKNOWN = Rates()


@dataclass(slots=True)
class _Flow:
    """Amounts by the seconds that they took, the last ones more."""

    steps: float = 0.0
    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: int, seconds: float) -> None:
        kept = math.exp(-seconds / MEMORY_S)
        self.steps = self.steps * kept + 1
        self.amount = self.amount * kept + amount
        self.seconds = self.seconds * kept + seconds

    @property
    def rate(self) -> float:
        return self.amount / self.seconds if self.seconds else 0.0

    @property
    def seconds_a_step(self) -> float:
        return self.seconds / self.steps if self.steps else 0.0


class RateMeter:
    """Told of each step and of each load. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._decoding = _Flow()
        self._prompts = _Flow()
        self._page_in = 0.0
        self._load = 0.0
        self._counted_at = -math.inf
        self._left = (0, 0)

    def step(self, rows: int, drawn: int, seconds: float) -> None:
        """A step is over that computed `rows` and drew so many tokens."""
        if drawn:
            self._decoding.add(drawn, seconds)
        if rows - drawn >= MANY_PROMPT_TOKENS:
            self._prompts.add(rows - drawn, seconds)

    def paged_in(self, seconds: float) -> None:
        self._page_in = _smoothed(self._page_in, seconds)

    def loaded(self, seconds: float) -> None:
        self._load = _smoothed(self._load, seconds)

    def rates(self, sequences: Collection[Sequence], now: float) -> Rates:
        """`sequences`: all that are accepted."""
        if not sequences:
            self._left = (0, 0)
        elif now - self._counted_at >= RECOUNT_S:
            self._counted_at = now
            self._left = (
                sum(max(0, each.uncomputed - 1) for each in sequences),
                sum(each.max_length - len(each.token_ids) for each in sequences),
            )
        return Rates(
            token_interval=self._decoding.seconds_a_step,
            tokens=self._decoding.rate,
            prompt_tokens=self._prompts.rate,
            prompt_tokens_left=self._left[0],
            answer_tokens_left=self._left[1],
            page_in=self._page_in,
            load=self._load,
        )


def _smoothed(before: float, seconds: float) -> float:
    return KEPT_OF_LOADS * before + (1 - KEPT_OF_LOADS) * seconds if before else seconds
