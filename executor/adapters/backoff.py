"""Pauses after loads that failed but may succeed later. Pure."""

from dataclasses import dataclass, field

from executor.rejection import Rejection

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 15.0


@dataclass(frozen=True, slots=True)
class _Pause:
    failures: int  # in a row
    until: float
    rejection: Rejection


@dataclass(slots=True)
class Backoffs:
    """Backoffs by digest: the pause doubles with every failure in a row, and is forgotten some time after its
    end."""

    _pauses: dict[str, _Pause] = field(default_factory=dict)

    def failed(self, digest: str, rejection: Rejection, now: float) -> None:
        before = self._pauses.get(digest)
        failures = before.failures + 1 if before else 1
        length = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 32))  # No float holds 2 ** 1024.
        self._pauses = {d: pause for d, pause in self._pauses.items() if now < pause.until + MAX_PAUSE_S}
        self._pauses[digest] = _Pause(failures, now + length, rejection)

    def clear(self, digest: str) -> None:
        self._pauses.pop(digest, None)

    def rejection(self, digest: str, now: float) -> Rejection | None:
        """Why its last load failed, as long as the pause lasts."""
        pause = self._pauses.get(digest)
        return pause.rejection if pause is not None and now < pause.until else None
