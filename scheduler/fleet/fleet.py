"""All executors of this scheduler by name: links and states, who comes and goes, commands to them."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from lorafleet.v1 import adapters_pb2, executor_pb2
from scheduler.fleet.breaker import Breaker
from scheduler.fleet.endpoint import Endpoint
from scheduler.fleet.index import FleetIndex
from scheduler.fleet.link import ExecutorLink, LinkSettings, Listener
from scheduler.fleet.memory import Memory
from scheduler.fleet.residency import Tier
from scheduler.fleet.settings import FleetSettings
from scheduler.fleet.slow_start import SlowStart
from scheduler.fleet.state import ExecutorState, Phase
from scheduler.fleet.wire import residency_rows

logger = logging.getLogger(__name__)


class Fleet:
    """Links by name. Starts connecting at `start`, lets go of everything at `stop`."""

    def __init__(
        self,
        settings: FleetSettings,
        link_settings: LinkSettings,
        listener: Listener,
        awake: Callable[[], float],
    ) -> None:
        """Without executors. `awake` is a clock in seconds that runs only while this loop is alive."""
        self._link_settings = link_settings
        self._listener = listener
        self._awake = awake
        self._links: dict[str, ExecutorLink] = {}
        self._memory = Memory()
        self._slow_start = SlowStart(settings.slow_start_s)
        self._breaker = Breaker(settings.circuit_failures)
        self.states: tuple[ExecutorState, ...] = ()
        self.index = FleetIndex((), settings.reserve_seats)
        self._tasks: dict[str, asyncio.Task[None]] | None = None  # By name, once started.
        self._ending: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._tasks = {}
        for name in self._links:
            self._connect(name)

    async def stop(self) -> None:
        """Closes all streams; executors cancel what was running there."""
        tasks = [*(self._tasks or {}).values(), *self._ending]
        self._tasks = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Who is here.

    def settle(self, endpoints: Iterable[Endpoint]) -> None:
        """The executors are these from now on: others leave."""
        wanted = {endpoint.name: endpoint for endpoint in endpoints}
        leaving = [self._dismiss(name) for name in self._links.keys() - wanted.keys()]
        coming = [self._take_up(endpoint) for endpoint in wanted.values()]
        if any(leaving) or any(coming):
            self._changed()

    def join(self, endpoint: Endpoint) -> None:
        """An executor comes, or comes back before it was gone, or is somewhere else now: then it gets nothing
        new before what runs at the former place has ended. Nothing when it is here as it was."""
        if self._take_up(endpoint):
            self._changed()

    def leave(self, name: str) -> None:
        """It gets nothing new from now on. What runs there goes on to its end; then it is gone, with all that
        is kept by its name: but cordons and pins of one with a name of its own wait for it to come back."""
        if self._dismiss(name):
            self._changed()

    def _take_up(self, endpoint: Endpoint) -> bool:
        """Whether that is news."""
        link, name = self._links.get(endpoint.name), endpoint.name
        if link:
            if not link.stay(endpoint):
                return False
            where = f"moves to {endpoint.address}" if link.has_moved else "is here again"
        else:
            where = f"joins at {endpoint.address}"
            kept = self._memory.joins(name)
            link = ExecutorLink(endpoint, self._link_settings, self._listener, self._awake, kept)
            self._links[name] = link
            self.index.join(link.state)
            self._connect(name)
        logger.info("executor %s: %s", name, where)
        return True

    def _dismiss(self, name: str) -> bool:
        """Whether that is news."""
        link = self._links[name]
        if link.is_leaving:
            return False
        link.leave()
        logger.info("executor %s: leaves, %d requests run there", name, link.state.num_running)
        return True

    def _changed(self) -> None:
        """Once for all that came and went together: who is told looks at the whole fleet."""
        self.states = tuple(link.state for link in self._links.values())
        self._listener.on_phase()

    def tend(self) -> None:
        """A few times a second: lets go of those that leave, or have moved, where nothing runs any more, and
        looks after the others."""
        idle = [link for link in self._links.values() if link.state.leaving and not link.state.num_running]
        for link in idle:
            if link.has_moved:
                link.connect_anew()
            else:
                self._let_go(link)
        if len(self.states) > len(self._links):
            self._changed()
        self.guard()

    # How far they are trusted.

    def guard(self) -> None:
        """At each change of a phase: before the next plan."""
        now = self._awake()
        self._slow_start.tend(self.states, now)
        self._breaker.tend(self.states, now)

    def served(self, name: str, dispatch_id: str) -> None:
        """An attempt had its first token there."""
        state = self._links[name].state
        was_tripped = state.tripped
        self._breaker.served(state, dispatch_id, self._awake())
        if was_tripped and not state.tripped:
            logger.info("executor %s: serves again, its circuit breaker is closed", name)
            self._listener.on_phase()

    def failed(self, name: str, dispatch_id: str = "") -> None:
        """An attempt failed through its fault. Nothing when it has gone since."""
        state = self._links[name].state if name in self._links else None
        if state is None:
            return
        was_tripped = state.tripped
        self._breaker.failed(state, dispatch_id, self._awake(), self.states)
        if state.tripped and not was_tripped:
            logger.warning("executor %s: fails what it is sent, so it gets nothing for a while", name)
            self._listener.on_phase()

    def failed_probe(self, name: str, dispatch_id: str) -> None:
        """An attempt failed, and not for certain through its fault."""
        self._breaker.failed_probe(self._links[name].state, dispatch_id, self._awake())

    def _let_go(self, link: ExecutorLink) -> None:
        name = link.state.name
        del self._links[name]
        if task := (self._tasks or {}).pop(name, None):
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        if link.has_own_name:
            link.kept.cordoned = link.state.cordoned
            self._memory.left(name, link.kept)
        self.index.leave(self.index.states.index(link.state))
        logger.info("executor %s: is gone", name)

    def _connect(self, name: str) -> None:
        if self._tasks is not None:
            run = self._links[name].run()
            self._tasks[name] = asyncio.create_task(run, name=f"executor {name}")

    @property
    def any_ready(self) -> bool:
        """Whether requests may wait for one: it is ready, and not cordoned."""
        return any(state.serves for state in self.states)

    def refusals(self) -> str | None:
        """Why nobody can ever run anything: the reasons, when every executor was refused."""
        states = self.states
        if not states or any(state.phase is not Phase.REFUSED for state in states):
            return None
        return "; ".join(f"executor {state.name} was refused: {state.detail}" for state in states)

    def state(self, name: str) -> ExecutorState | None:
        """The executor by name, or else by the address where it is reached."""
        link = self._links.get(name)
        if link:
            return link.state
        return next((state for state in self.states if state.address == name), None)

    # Commands, by name.

    def tier(self, name: str, digest: str) -> Tier:
        """Where an executor's closest copy is."""
        return self._links[name].state.residency.tier(digest)

    def promise(self, name: str, dispatch_id: str, digest: str, tenant: str) -> None:
        """Counts a dispatch that will be sent with the next `dispatch`."""
        self._links[name].state.sent(dispatch_id, digest, time.monotonic(), tenant)

    def dispatch(self, name: str, dispatches: list[executor_pb2.Dispatch]) -> None:
        """Sends what was promised."""
        self._links[name].dispatch(dispatches)

    def cancel(self, name: str, dispatch_id: str) -> None:
        self._links[name].cancel(dispatch_id)

    def prefetch(self, name: str, digest: str, need_by_s: float, expected_uses: int) -> None:
        self._links[name].prefetch(digest, need_by_s, expected_uses)

    def tell_wait(self, name: str, digest: str, expected_uses: int, waiting_s: float, lasts_s: float) -> None:
        self._links[name].tell_wait(digest, expected_uses, waiting_s, lasts_s)

    # Copies. Without `names` it is about all executors, also those that left and those that are to come.

    def drop(self, digest: str, adapter: str = "", names: Iterable[str] = ()) -> None:
        """Ends the pins of an adapter ("tenant/name"; "": of all), and frees the copies that no other adapter
        pins, once nobody uses them."""
        if not names:
            self._memory.drop(digest, adapter)
        for link in self._chosen(names):
            link.drop(digest, adapter)

    def pin(self, digest: str, adapter: str, tier: Tier, names: Iterable[str] = ()) -> None:
        """Executors load the version and keep it while any adapter pins it; those that are away do when they
        come back."""
        if not names:
            self._memory.pin((digest, adapter), tier)
        for link in self._chosen(names):
            link.pin(digest, adapter, tier)

    def unpin(self, digest: str, adapter: str, names: Iterable[str] = ()) -> None:
        """Ends the pins of one adapter."""
        if not names:
            self._memory.unpin((digest, adapter))
        for link in self._chosen(names):
            link.unpin(digest, adapter)

    def pinned(self) -> set[tuple[str, str]]:
        """("tenant/name", digest) of all pins that were asked for here."""
        here = {pin for link in self._links.values() for pin in link.kept.pins}
        return {(adapter, digest) for digest, adapter in here | self._memory.pinned()}

    def missing_pins(self) -> Mapping[str, int]:
        """The missing pins by name: versions that an executor should keep and does not. From any thread."""
        return {link.state.name: link.missing_pins() for link in list(self._links.values())}

    def _chosen(self, names: Iterable[str]) -> list[ExecutorLink]:
        """Those by their names or addresses that are here, or all."""
        states = [state for name in names if (state := self.state(name))]
        return [self._links[state.name] for state in states] if names else list(self._links.values())

    def residency(self) -> list[adapters_pb2.AdapterResidency]:
        """Every copy on every executor, by executor, then digest."""
        states = sorted(self.states, key=lambda state: state.name)
        epoch = time.time() - time.monotonic()
        return [row for state in states for row in residency_rows(state, epoch)]
