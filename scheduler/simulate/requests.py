"""What is asked of a simulated fleet, and what becomes of it."""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. `at` in seconds; `digest` "" is the base model. `deadline_s`: its caller gives up so long
    after; None: never. The first `shared` tokens of the prompt were in the session's last turn, too. One that
    was refused comes again with the same `request_id`, after so many `tries`."""

    at: float
    digest: str
    prompt: int
    output: int
    tenant: str = "tenant"
    session: str = ""
    shared: int = 0
    deadline_s: float | None = None
    request_id: str = ""
    tries: int = 0


class End(Enum):
    OPEN = "open"  # It had not ended when the simulation did.
    ANSWERED = "answered"
    REFUSED = "refused"  # At once, by the estimate or a quota.
    UNFIT = "unfit"  # At once: no executor can ever run it.
    FULL = "full"  # At once, by the queue's bound.
    MISSED = "missed"  # Its deadline passed.


@dataclass(slots=True)
class Record:
    """Times are in seconds on the clock; None for what did not happen."""

    asked: Asked
    number: int
    end: End = End.OPEN
    sent_at: float | None = None
    first_at: float | None = None
    ended_at: float | None = None
    executor: str = ""
    tokens: int = 0  # Of the answer, as far as was told.
    before: int = 0  # Of them, by attempts before the last one.
    attempts: int = 0
    cached: int = 0
    estimate_s: float | None = None  # That it was refused by.
    retry_after_s: float | None = None  # That its caller was told with a refusal.

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.asked.at

    @property
    def token_s(self) -> float | None:
        """Seconds a token after the first."""
        if self.first_at is None or self.ended_at is None or self.tokens < 2:
            return None
        return (self.ended_at - self.first_at) / (self.tokens - 1)
