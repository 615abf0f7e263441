"""What tells of executors, and may tell of others the next time it is asked."""

from collections.abc import Sequence
from typing import Protocol

from scheduler.fleet.endpoint import Endpoint

MAX_FOUND = 10_000
"""Executors of one source: more are a mistake, as a wrong file or name would be."""


class DiscoveryError(Exception):
    """A source cannot tell; the text says which one, why, and what to do where that is known."""


class Source(Protocol):
    """`first` is what is known before it is asked for the first time."""

    @property
    def flag(self) -> str:
        """The flag as the user wrote it."""

    @property
    def first(self) -> Sequence[Endpoint]: ...

    async def find(self) -> Sequence[Endpoint]:
        """All executors that there are now. Raises DiscoveryError when that cannot be told: no executor,
        on the other hand, is an answer."""


def bounded(found: Sequence[Endpoint], flag: str) -> Sequence[Endpoint]:
    """The same. Raises DiscoveryError when there are too many."""
    if len(found) > MAX_FOUND:
        raise DiscoveryError(f"{flag}: tells of {len(found)} executors, more than {MAX_FOUND}")
    return found
