"""The steps of a simulated executor on their way, and the quiet ones that may be skipped over. Pure.

A step is quiet when those that decode go on and nothing else happens. Each takes a little longer than the one
before it, since it reads more of the KV cache; so the end of any of them is known without the others.
"""

from dataclasses import dataclass
from math import sqrt

from scheduler.simulate.costs import Costs
from scheduler.simulate.executors.batch import Batch
from scheduler.simulate.executors.sequence import Sequence
from scheduler.simulate.executors.step_plan import StepPlan

SAME_S = 1e-9  # Times that differ by less are one.


@dataclass(frozen=True, slots=True)
class Flight:
    """A step on its way, with the prompts that are done by it."""

    step: int
    ends_at: float
    drawing: tuple[Sequence, ...] = ()


class Flights:
    """Steps one after the other, `costs.steps_ahead` of them planned behind the one that runs."""

    def __init__(self, batch: Batch, costs: Costs) -> None:
        self.num_steps = 0
        self.landed = 0  # The last step that is over, quiet ones left out.
        self._batch = batch
        self._costs = costs
        self._steps_ahead = costs.steps_ahead
        self._flights: list[Flight] = []
        self._quiet = 0  # How many steps may follow the last one of them.

    def __bool__(self) -> bool:
        return bool(self._flights)

    @property
    def is_full(self) -> bool:
        """No further step is planned before one is over."""
        return len(self._flights) > self._steps_ahead

    @property
    def is_quiet(self) -> bool:
        return self._quiet > 0

    def launch(self, plan: StepPlan, now: float, page_in_s: float) -> None:
        """Page-ins are made while the step before runs."""
        begins_at = max(self._flights[-1].ends_at if self._flights else now, now + page_in_s)
        seconds = self._step_s(plan.decoding, plan.kv_tokens, plan.prompt_tokens)
        self._flights.append(Flight(plan.step, begins_at + seconds, tuple(plan.drawing)))
        self.num_steps += 1

    def land(self, now: float) -> Flight | None:
        """The next step that is over."""
        if not self._flights or self._flights[0].ends_at > now:
            return None
        flight = self._flights.pop(0)
        self.landed = flight.step
        return flight

    def next_landing(self) -> float:
        """The end of the step that runs."""
        return self._flights[0].ends_at

    def last_quiet_landing(self) -> float:
        """The end of the last step, from now on, before which nothing happens by itself. What can be skipped
        over until then is skipped by `catch_up`."""
        last, end = self._flights[-1], self._batch.next_end
        self._quiet = 0
        if not any(flight.drawing for flight in self._flights):
            self._quiet = self._batch.quiet_steps()
        if end is not None:
            self._quiet = max(0, min(self._quiet, end - last.step))
        if not self._quiet:
            return self.next_landing()
        return last.ends_at + self._seconds_of(self._quiet - self._steps_ahead)

    def landing_after(self, now: float) -> float:
        """The end of the step that runs then."""
        for flight in self._flights:
            if flight.ends_at >= now:
                return flight.ends_at
        return self._flights[-1].ends_at + self._seconds_of(self._steps_until(now))

    def catch_up(self, now: float) -> None:
        """Plans the quiet steps that are planned by now, and leaves out those that were over before."""
        is_quiet, self._quiet = self.is_quiet, 0
        if not is_quiet or now <= self.next_landing():
            return
        last = self._flights[-1]
        landing = last.step + self._steps_until(now)
        if now <= last.ends_at:
            landing = next(flight.step for flight in self._flights if flight.ends_at >= now)
        on_their_way = range(landing, landing + self._steps_ahead + 1)
        flights = [flight for flight in self._flights if flight.step >= landing]
        for step in on_their_way[len(flights) :]:
            flights.append(Flight(step, last.ends_at + self._seconds_of(step - last.step)))
        skipped = on_their_way[-1] - last.step
        self._batch.skip(skipped)
        self.num_steps += skipped
        self._flights = flights
        self.landed = landing - 1

    def landed_by(self, now: float) -> int:
        """The last step that is over, quiet ones among them."""
        if not self._quiet or now < self.next_landing():
            return self.landed
        last = self._flights[-1]
        if now <= last.ends_at:
            return max(flight.step for flight in self._flights if flight.ends_at <= now)
        return last.step + self._steps_until(now) - 1

    def _seconds_of(self, steps: int) -> float:
        """How long so many quiet steps take."""
        decoding = self._batch.num_decoding
        first = self._step_s(decoding, self._batch.decoding_tokens + decoding, 0)
        return steps * first + self._costs.step.kv_token_s * decoding * steps * (steps - 1) / 2

    def _step_s(self, decoding: int, kv_tokens: int, prompt_tokens: int) -> float:
        slots = self._batch.slots
        return self._costs.seconds(decoding, kv_tokens, prompt_tokens, slots.used_rank, len(slots))

    def _steps_until(self, now: float) -> int:
        """The first quiet step that is over then or later, counted from those on their way."""
        passed = now - self._flights[-1].ends_at
        if passed <= SAME_S:
            return 0
        slope = self._costs.step.kv_token_s * self._batch.num_decoding / 2
        first = self._seconds_of(1) - slope
        guess = (sqrt(first * first + 4 * slope * passed) - first) / (2 * slope) if slope else passed / first
        steps = int(guess)
        while self._seconds_of(steps) < passed - SAME_S:
            steps += 1
        while steps and self._seconds_of(steps - 1) >= passed - SAME_S:
            steps -= 1
        return steps
