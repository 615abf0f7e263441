"""How far estimates are off, learned from what happened. Pure.

What is learned are three points of the distribution of happened / estimated: the middle, which makes
estimates right on average, a low one that a tenth of requests come below, and a high one that a tenth come
above. Each sample moves a point by the side on which it lies and not by how far, so that no outlier weighs
more than another sample.
"""

import math
from dataclasses import dataclass, field

ENOUGH = 20  # Samples before which nothing is said.
MOST = math.log(8.0)  # Bound on what is learned, either way.
_FIRST_STEP, _LAST_STEP = 0.5, 0.1  # In logarithms; a step shrinks as samples come.
_QUICK = 50  # Samples that move points as far as that says.
# Later they move by so much a second at most: what goes up and down in ten seconds, as a queue does that is
# let grow and shrink, is to be seen as a spread.
_SPEED = 0.03
_HALF_LIFE_S = 3600.0  # Without samples, half of what was learned is forgotten.
_TENTH = 0.1


@dataclass(slots=True)
class _Point:
    """A quantile of the logarithm of happened / estimated."""

    quantile: float
    start: float
    at: float = field(init=False)

    def __post_init__(self) -> None:
        self.at = self.start

    def move(self, below: bool, step: float) -> None:
        self.at = min(MOST, max(-MOST, self.at + step * (self.quantile - below)))

    def forget(self, share: float) -> None:
        self.at += (self.start - self.at) * share


@dataclass(slots=True)
class Calibration:
    """Of one kind of estimate. At first it doubts: the low point lies far below."""

    samples: int = 0
    _middle: _Point = field(default_factory=lambda: _Point(0.5, 0.0))
    _low: _Point = field(default_factory=lambda: _Point(_TENTH, math.log(0.5)))
    _high: _Point = field(default_factory=lambda: _Point(1 - _TENTH, 0.0))
    _last: float = -math.inf

    @property
    def known(self) -> bool:
        return self.samples >= ENOUGH

    @property
    def factor(self) -> float:
        """How much longer it takes than estimated, in the middle."""
        return math.exp(self._middle.at)

    def margin(self, strictness: float) -> float:
        """How much longer than estimated nine in ten take at least (strictness 0) or at most (1)."""
        low, high = self._low.at, max(self._low.at, self._high.at)
        return math.exp(low + (high - low) * strictness)

    def learn(self, estimated: float, happened: float, now: float, *, at_least: bool = False) -> None:
        """Seconds, above 0. `at_least`: it was over before that happened, which tells nothing where it was
        over early."""
        ratio, elapsed = math.log(happened / estimated), now - self._last
        self._forget(now)
        self.samples += 1
        step = max(_LAST_STEP, _FIRST_STEP / math.sqrt(self.samples))
        if self.samples > _QUICK:
            step = min(step, max(0.0, elapsed) * _SPEED)
        for point in (self._low, self._middle, self._high):
            below = ratio < point.at
            if not (below and at_least):
                point.move(below, step)

    def _forget(self, now: float) -> None:
        if self._last < now < math.inf and self._last > -math.inf:
            share = 1 - 0.5 ** ((now - self._last) / _HALF_LIFE_S)
            for point in (self._low, self._middle, self._high):
                point.forget(share)
        self._last = now
