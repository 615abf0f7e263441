"""How fast a simulated executor says that it is: executor/batch/rates.py, without a look at each step.
Pure."""

from scheduler.fleet.rates import Rates
from scheduler.simulate.executors.batch import Batch
from scheduler.simulate.executors.flights import Flights

SAMPLE_STEPS = 16  # After so many its speed is measured anew.
_KEPT = 0.8  # What a sample leaves of those before.


class RateWatch:
    """Asked at each report."""

    def __init__(self) -> None:
        self._interval_s = 0.0
        self._step = 0
        self._at = 0.0

    def rates(self, flights: Flights, batch: Batch, now: float) -> Rates:
        landed = flights.landed_by(now)
        if not flights:
            self._step, self._at = landed, now  # It idles from now on: that is no part of a step.
        elif landed - self._step >= SAMPLE_STEPS:
            sample = (now - self._at) / (landed - self._step)
            before = self._interval_s or sample
            self._interval_s = _KEPT * before + (1 - _KEPT) * sample
            self._step, self._at = landed, now
        running = len(batch.running)
        return Rates(
            token_interval=round(self._interval_s, 6),  # As on the wire.
            tokens=round(running / self._interval_s) if self._interval_s else 0,
        )
