"""Requests, the lanes that they come in, and the records of what was seen of their answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Request:
    """`at`: seconds after the start when it is due. `adapter`: a ref, None for the base model."""

    at: float
    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Lane:
    """Requests in order of `at`, of which at most `max_concurrency` are under way (None: no limit).

    A background lane ends with the last of the others: what it has under way then is cut off.
    """

    name: str
    requests: Sequence[Request]
    max_concurrency: int | None = None
    background: bool = False


@dataclass(slots=True)
class Record:
    """One request as its sender saw it. Times are seconds on the clock of the sender.

    `pieces` are (time, tokens) of what arrived. `error` is empty unless it failed; `cut` says that it was
    ended from here, which is no failure. `retry_after`: seconds, where its failure named some.
    """

    lane: str
    request: Request
    due: float
    sent: float
    pieces: list[tuple[float, int]] = field(default_factory=list)
    ended: float | None = None
    error: str = ""
    retry_after: float | None = None
    cut: bool = False

    @property
    def output_tokens(self) -> int:
        return sum(count for _, count in self.pieces)

    @property
    def whole(self) -> bool:
        """It ended well."""
        return self.ended is not None and not self.error and not self.cut


@dataclass(slots=True)
class Recording:
    """All that happened so far, readable at any time."""

    records: list[Record] = field(default_factory=list)
    started: float = 0.0
    ended: float | None = None

    def lane(self, name: str) -> "Recording":
        """Only that lane's requests."""
        return Recording([r for r in self.records if r.lane == name], self.started, self.ended)
