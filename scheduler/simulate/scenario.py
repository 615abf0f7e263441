"""What is simulated: executors, adapters, traffic, and executors that come and go."""

from dataclasses import dataclass, field, replace
from typing import Literal

from scheduler.dispatch.settings import DispatcherSettings
from scheduler.simulate.executors.settings import ExecutorSettings
from scheduler.simulate.traffic import Sessions, Traffic

ALL_RESIDENT = "all-resident"


@dataclass(frozen=True, slots=True)
class Change:
    """An executor becomes a member, leaves (what runs there goes on), or is lost with all that it runs."""

    at: float
    kind: Literal["join", "leave", "lose"]
    name: str


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests come for `seconds`; those of the first `warm_s` are not measured. Adapters have `ranks` in
    turn, and requests schedulers. `preloaded`: each executor begins with adapters in host memory and slots,
    the first ones."""

    name: str
    about: str
    executors: int = 8
    schedulers: int = 1
    adapters: int = 200
    ranks: tuple[int, ...] = (16,)
    executor: ExecutorSettings = field(default_factory=ExecutorSettings)
    traffic: Traffic | None = None
    sessions: Sessions | None = None
    seconds: float = 120.0
    warm_s: float = 20.0
    preloaded: bool = False
    changes: tuple[Change, ...] = ()
    dispatcher: DispatcherSettings = field(
        default_factory=lambda: DispatcherSettings(max_queued=1 << 20, max_queued_per_tenant=1 << 20)
    )

    @property
    def names(self) -> list[str]:
        """The names of its executors; those that join come last."""
        return [f"executor-{number}" for number in range(self.executors)]

    @property
    def rate(self) -> float:
        """Requests a second; of sessions, how many there are at once."""
        if self.traffic:
            return self.traffic.rate
        return float(self.sessions.at_once) if self.sessions else 0.0

    def at_rate(self, rate: float) -> "Scenario":
        """The same with other traffic."""
        return replace(self, traffic=replace(self.traffic, rate=rate)) if self.traffic else self

    def all_resident(self, rank_bytes: int) -> "Scenario":
        """The same with a slot for each adapter, and all of them there from the beginning."""
        room = 2 * self.adapters * max(self.ranks) * rank_bytes
        executor = replace(self.executor, slots=max(1, self.adapters), host_bytes=room)
        return replace(self, executor=executor, preloaded=True)
