"""Who is told of every change of an executor's state, and attributes whose changes are told."""

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Watcher(Protocol):
    """Told of every change of an executor's state as it happens; `position` is the executor's among all."""

    def room_changed(self, position: int) -> None:
        """A dispatch was sent, or ended: it may have other seats and slots."""

    def state_changed(self, position: int) -> None:
        """It takes requests or takes none any more, or has reported."""

    def limits_changed(self, position: int) -> None: ...

    def claim_changed(self, position: int, digest: str, claimed: bool) -> None:
        """The first dispatch of a version was sent, or the last one ended."""

    def tenant_changed(self, position: int, tenant: str, running: int) -> None:
        """A dispatch of a tenant was sent, or ended: so many of it have not."""

    def copies_changed(self, position: int, digests: Iterable[str]) -> None:
        """Their closest copies may be elsewhere now."""


class Teller(Protocol):
    """What has attributes that are `Told`."""

    def tell_state(self) -> None: ...


class Told(Generic[T]):
    """An attribute; each time that it is set is told."""

    def __init__(self, first: T) -> None:
        self._first = first

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, teller: Teller, owner: type) -> T:
        value: T = teller.__dict__.get(self._name, self._first)
        return value

    def __set__(self, teller: Teller, value: T) -> None:
        teller.__dict__[self._name] = value
        teller.tell_state()
