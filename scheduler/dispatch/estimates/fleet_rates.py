"""What the executors together do, from what each reports. Pure."""

from dataclasses import dataclass
from statistics import harmonic_mean

from scheduler.fleet.index import FleetIndex
from scheduler.fleet.levels import bits
from scheduler.fleet.state import ExecutorState


@dataclass(frozen=True, slots=True)
class FleetRates:
    """Of those that take requests. Times are in seconds, tokens by the second; 0 is unknown.

    tokens: new ones, of all executors together while their seats are taken. token_interval: from one token of
    a sequence to its next. prompt_wait: until prompts are computed that are accepted already. prompt_tokens:
    of one executor. seat_tokens: that those with a seat may have had when they end, at most, if they are half
    done on average. unknown: the mask of those that do not say how fast they are.
    """

    tokens: float = 0.0
    token_interval: float = 0.0
    prompt_wait: float = 0.0
    prompt_tokens: float = 0.0
    seat_tokens: float = 0.0
    page_in: float = 0.0
    load: float = 0.0
    unknown: int = 0


def measure(index: FleetIndex) -> FleetRates:
    """Looks at every executor that takes requests."""
    states = [(position, index.states[position]) for position in bits(index.open)]
    told = [state for _, state in states if state.report.rates.token_interval]
    if not told:
        return FleetRates(unknown=index.open)
    with_prompts = [state.report.rates for state in told if state.report.rates.prompt_tokens]
    tokens = sum(map(_tokens, told))
    taken = sum(map(_taken, told))
    return FleetRates(
        tokens=tokens,
        # Who is slow takes fewer: most requests go where seats become free soonest.
        token_interval=harmonic_mean([state.report.rates.token_interval for state in told]),
        prompt_wait=_mean([rates.prompt_tokens_left / rates.prompt_tokens for rates in with_prompts]),
        prompt_tokens=_mean([rates.prompt_tokens for rates in with_prompts]),
        seat_tokens=2 * sum(state.report.rates.answer_tokens_left for state in told) / max(1, taken),
        page_in=_mean([state.report.rates.page_in for state in told if state.report.rates.page_in]),
        load=_mean([state.report.rates.load for state in told if state.report.rates.load]),
        unknown=sum(1 << position for position, state in states if not state.report.rates.token_interval),
    )


def _tokens(state: ExecutorState) -> float:
    """A second, with all seats taken. What was measured is of before, when fewer may have run: nobody is to
    be refused for a fleet that was idle a moment ago."""
    rates = state.report.rates
    seats = state.limits.max_seats if state.limits else 0
    return max(rates.tokens, seats / rates.token_interval)


def _taken(state: ExecutorState) -> int:
    return max(0, state.limits.max_seats - state.free_seats) if state.limits else 0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
