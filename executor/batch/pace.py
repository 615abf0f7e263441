"""How many tokens the next step may have while sequences decode. Pure: times are measured elsewhere.

A step's prompts make everybody who decodes wait for them, and prompts that wait make their callers wait for a
first token. So the rows of a step follow both, and measured times of steps by their rows:

- Nothing decodes: no bound. All that is there goes into one step.
- `QUIET_STEPS` decode steps: prompts always have the rows up to there. A step of decoding streams the weights
  anyway, so these rows cost the least time each.
- Up to the bound on a step (`BOUND_STEPS` decode steps by default), so many rows that the prompts that are
  there are done in `SPREAD_STEPS` steps.
- Beyond the bound, so many that they are done in `CROWD_STEPS` steps: with more to do than that, decoding
  would be smooth at the cost of all who wait. In a crowd, `CROWD` prompts and at least as many as decode, all
  go into one step, until the crowd is gone: a burst on an idle engine has nearly nobody to disturb. Both end
  at `CROWD_BOUNDS` times the bound.

Prompts have `LEAST_TOKENS` of a step, also where decoding alone takes longer than the bound. And no step is
longer than the one that does most of their tokens a second: the host launches a step just beyond the captured
sizes three times as long as the largest of these takes.

The figures were found with the heartbeat in virtual time and steps that take what an 8B model takes on an
H200. Prompts of 128 to 1,024 tokens, 64 to 256 back, at 17 a second: gaps p99 and longest 11.3 ms (without a
bound 20 and 35), first token p50 47 ms and p99 104 (28 and 61). At 60 a second, beyond capacity, as many
tokens a second, and gaps p99 39 ms (102).
"""

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

BOUND_STEPS = 2.5  # some 15 ms, 450 rows
QUIET_STEPS = 1.25  # less than 9 ms with 64 sequences, 128 rows
SPREAD_STEPS = 3
CROWD_STEPS = 12
CROWD = 8
CROWD_BOUNDS = 12  # some 180 ms, 8,000 rows
LEAST_TOKENS = 32
# Times of a size that are kept: their median is not moved by the few that something else made long.
_SAMPLES = 9
_FIRST_SIZE = 16


@dataclass(frozen=True, slots=True)
class Load:
    """Of the sequences that could be in the next step: those that decode, the others (`prompts`), and the
    tokens that these still need, at most."""

    decoding: int
    prompts: int
    prompt_tokens: int


class StepTimes:
    """Seconds of steps by their rows: the median of the last few of each size.

    What a size that was not met takes is guessed: no longer than a greater one, and no longer a row than a
    smaller one. Both hold for sizes that were met, too, so one whose first time was an accident is tried
    again. Only from captured steps to those that are launched kernel by kernel, time a row may grow.
    """

    def __init__(self, captured: Collection[int], most_rows: int) -> None:
        """captured: rows of the steps with prompts that are captured."""
        self._largest_captured = max(captured, default=0)
        self._sizes = _sizes(captured, most_rows)
        self._samples: dict[tuple[int, bool], deque[float]] = {}
        self._medians: dict[tuple[int, bool], float] = {}
        self._expected = dict.fromkeys(self._sizes, math.inf)  # of steps with prompts

    def observe(self, rows: int, decode: bool, seconds: float) -> None:
        """A step took so long; `decode`: it had one row a sequence."""
        key = self.size_for(rows), decode
        samples = self._samples.setdefault(key, deque(maxlen=_SAMPLES))
        samples.append(seconds)
        self._medians[key] = median(samples)
        if not decode:
            self._expected = self._expect()

    def decode(self, rows: int) -> float:
        """Seconds of a step of so many rows that only decodes, or may have prompts if there was no other one;
        0: nothing is known."""
        size = self.size_for(rows)
        known = self._medians.get((size, True), self._expected[size])
        return 0.0 if math.isinf(known) else known

    def size_for(self, rows: int) -> int:
        """The smallest size for so many rows, or else the largest one."""
        return next((size for size in self._sizes if size >= rows), self._sizes[-1])

    def rows_within(self, seconds: float) -> int:
        """The largest size with prompts that takes so long at most; 0: none does, or none is known."""
        return max((size for size, expected in self._expected.items() if expected <= seconds), default=0)

    def fastest(self, least: int, most: int, decoding: int) -> int:
        """Of the sizes from `least` to `most`, the one that does most prompt tokens a second beside so many
        rows that decode; `most` if nothing is known."""
        sizes = [size for size in self._sizes if least <= size <= most]
        return max(sizes, key=lambda size: ((size - decoding) / self._expected[size], size), default=most)

    def _expect(self) -> dict[int, float]:
        by_smaller, last, a_row = dict[int, float](), 0, math.inf
        for size in self._sizes:
            time = self._medians.get((size, False), math.inf)
            if last != self._largest_captured or math.isinf(time):
                time = min(time, a_row * size)
            by_smaller[size] = time
            last, a_row = size, time / size
        downwards = self._sizes[::-1]
        return dict(zip(downwards, accumulate((by_smaller[size] for size in downwards), min), strict=True))


class Pace:
    """Says how many tokens the next step may have."""

    def __init__(self, times: StepTimes, most_tokens: int, bound_s: float | None) -> None:
        """most_tokens: of any step. bound_s: on a step while sequences decode; None: `BOUND_STEPS` decode
        steps, as they are measured; infinite: there is none."""
        self.times = times
        self._most_tokens = most_tokens
        self._bound_s = bound_s
        self._crowd = False

    def most_tokens(self, load: Load) -> int:
        """Of the next step, asked once for each. Each sequence that decodes has one of them."""
        decode_s = self.times.decode(load.decoding) if load.decoding else 0.0
        bound_s = self._bound_s or BOUND_STEPS * decode_s
        if not load.decoding or not bound_s or math.isinf(bound_s):
            return self._most_tokens
        self._crowd = load.prompts >= (CROWD if self._crowd else max(CROWD, load.decoding))
        least = self._rows_for(load, LEAST_TOKENS)
        rows = max(
            least,
            self.times.rows_within(min(bound_s, QUIET_STEPS * decode_s)),
            min(self._rows_for(load, load.prompt_tokens / SPREAD_STEPS), self.times.rows_within(bound_s)),
            min(
                self._rows_for(load, load.prompt_tokens / (1 if self._crowd else CROWD_STEPS)),
                self.times.rows_within(CROWD_BOUNDS * bound_s),
            ),
        )
        return min(self.times.fastest(least, rows, load.decoding), self._most_tokens)

    def _rows_for(self, load: Load, prompt_tokens: float) -> int:
        """What is captured for them is filled up: those rows cost nothing."""
        return self.times.size_for(load.decoding + math.ceil(prompt_tokens))


def _sizes(captured: Collection[int], most_rows: int) -> tuple[int, ...]:
    """The captured ones, then each a quarter more than the one before, to `most_rows`."""
    sizes = sorted(captured)
    while not sizes or sizes[-1] < most_rows:
        more = sizes[-1] + sizes[-1] // 4 if sizes else _FIRST_SIZE
        sizes.append(min(more, most_rows))
    return tuple(sizes)
