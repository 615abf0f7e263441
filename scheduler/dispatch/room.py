"""Whether there is room for one more request of a tenant: in the queue, and in what it may have."""

from scheduler.dispatch.live_requests import LiveRequests
from scheduler.dispatch.queue import Queue
from scheduler.errors import QueueFull, TooManyStreams
from scheduler.tenants.tenants import Tenants


class Room:
    """`again`, everywhere: the request was accepted before, by a scheduler or over a connection that was
    lost. No quota refuses it, and the queue takes twice as many of those."""

    def __init__(self, queue: Queue, accepted: LiveRequests, tenants: Tenants) -> None:
        self._queue, self._accepted, self._tenants = queue, accepted, tenants

    def check(self, tenant: str, *, again: bool = False) -> None:
        """Cheap: to be asked before a request costs anything. Raises QueueFull, TooManyStreams."""
        held = self._accepted.of_tenant(tenant)
        if not again and 0 < self._tenants.limits(tenant).max_streams <= held:
            raise TooManyStreams(tenant, held)
        if full := self._queue.full(tenant, again=again):
            whose = "the queue" if full == "total" else f"the queue of tenant {tenant!r}"
            raise QueueFull(f"{whose} is full")
