"""Who is told of every change of an executor's state."""

from collections.abc import Iterable
from typing import Protocol


class Watcher(Protocol):
    """Told of every change of an executor's state as it happens; `position` is the executor's among all."""

    def room_changed(self, position: int) -> None:
        """A dispatch was sent, or ended: it may have other seats and slots."""

    def state_changed(self, position: int) -> None:
        """It takes requests or takes none any more, or has reported."""

    def limits_changed(self, position: int) -> None: ...

    def claim_changed(self, position: int, digest: str, claimed: bool) -> None:
        """The first dispatch of a version was sent, or the last one ended."""

    def tenant_changed(self, position: int, tenant: str, present: bool) -> None:
        """The first dispatch of a tenant was sent, or the last one ended."""

    def copies_changed(self, position: int, digests: Iterable[str]) -> None:
        """Their closest copies may be elsewhere now."""
