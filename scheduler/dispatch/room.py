"""Whether there is room for one more request of a tenant: in the queue, and in what it may have."""

from collections.abc import Callable

from lorafleet.doors.places import Line
from lorafleet.v1 import inference_pb2
from scheduler.admission.asked import costs_of
from scheduler.dispatch.estimates.full_queue import FullQueue
from scheduler.dispatch.live_request import LiveRequest
from scheduler.dispatch.live_requests import LiveRequests
from scheduler.dispatch.queue import Queue
from scheduler.errors import QueueFull, RateExceeded, TooManyStreams
from scheduler.tenants.quotas import Quotas
from scheduler.tenants.rates import Costs, Refusal
from scheduler.tenants.tenants import Tenants


class Room:
    """`again`, everywhere: the request was accepted before, by a scheduler or over a connection that was
    lost. No rate refuses it, and of its tenant, as in the queue, there may be twice as many of those.

    Who is refused for what its tenant may take finds, after the told delay, what it needs kept for the same
    request id.
    """

    def __init__(
        self,
        queue: Queue,
        accepted: LiveRequests,
        tenants: Tenants,
        quotas: Quotas,
        clock: Callable[[], float],
    ) -> None:
        self._queue, self._accepted, self._tenants = queue, accepted, tenants
        self._quotas, self._clock = quotas, clock
        self._streams, self._waiting = Line(), Line()
        self._full_queue = FullQueue(queue)

    def check(
        self,
        tenant: str,
        request: inference_pb2.GenerateRequest,
        max_model_len: int,
        *,
        again: bool,
    ) -> None:
        """Cheap: to be asked before a request costs anything. Raises QueueFull, TooManyStreams,
        RateExceeded."""
        key = request.request_id
        self.check_places(tenant, key, again=again)
        if not again and self._tenants.limits(tenant).has_rates:
            least, guess = costs_of(request, max_model_len)
            self._raise(tenant, self._quotas.check(tenant, least, self._clock(), key, guess))

    def check_places(self, tenant: str, key: str, *, again: bool, enters: bool = False) -> None:
        """`key` is the request's id; it may be about to enter. Raises QueueFull, TooManyStreams."""
        limits, now = self._tenants.limits(tenant), self._clock()
        wait_s = self._full_queue.check(tenant, key, now, again=again, enters=enters)
        if wait_s is not None:
            raise QueueFull(_full(tenant, "total"), retry_after_s=wait_s)
        held = self._accepted.of_tenant(tenant)
        if limits.max_streams:
            wait_s = _no_place(self._streams, tenant, held, limits.max_streams, now, key, again)
            if wait_s is not None:
                raise TooManyStreams(tenant, held, wait_s)
        waiting = self._queue.tenants.get(tenant)
        size, most = waiting.size if waiting else 0, self._tenants.max_queued(tenant)
        wait_s = _no_place(self._waiting, tenant, size, most, now, key, again)
        if wait_s is not None:
            raise QueueFull(_full(tenant, "tenant"), retry_after_s=wait_s)

    def take(self, live: LiveRequest, *, again: bool) -> None:
        """The request is accepted now: it pays, or RateExceeded is raised and nothing was taken. One that was
        accepted before has paid for its prompt; what it brings of its answer is charged as a prompt, since
        its client may say so of any tokens, and what it generates from here on."""
        tenant, admitted = live.waiting.tenant, live.admitted
        brought = len(admitted.resumed_token_ids)
        output = admitted.stopping.max_new_tokens - brought
        if again:
            self._quotas.charge(tenant, Costs(0, brought, output), self._clock())
        else:
            costs = Costs(1, len(admitted.prompt_token_ids) + brought, output)
            self._raise(tenant, self._quotas.take(tenant, costs, self._clock(), admitted.request_id))
        live.reserved_tokens = output if self._tenants.limits(tenant).output_tokens_per_minute else 0
        for line in (self._streams, self._waiting):
            line.taken(tenant, admitted.request_id, self._clock())

    def ended(self, live: LiveRequest) -> None:
        """Gives back what its answer did not use."""
        tenant, now = live.waiting.tenant, self._clock()
        if live.reserved_tokens:
            produced = len(live.progress.output) - len(live.admitted.resumed_token_ids)
            self._quotas.give_back(tenant, live.reserved_tokens - produced)
        self._full_queue.left(now)
        self._streams.ended(tenant, self._accepted.of_tenant(tenant) + 1, now)
        if waiting := self._queue.tenants.get(tenant):  # As one ends, one of those that wait goes on.
            self._waiting.ended(tenant, waiting.size, now)

    def _raise(self, tenant: str, refusal: Refusal | None) -> None:
        if refusal is not None:
            raise RateExceeded(tenant, refusal.reason, refusal.wait_s)


def _no_place(
    line: Line, tenant: str, held: int, most: float, now: float, key: str, again: bool
) -> float | None:
    """As Places.ask. Of those that were accepted before there is a place for twice as many, that of new ones
    included who were told to come again."""
    most *= 2 if again else 1
    return None if again and held < most else line.of(tenant, now).ask(held, most, now, key)


def _full(tenant: str, bound: str) -> str:
    return "the queue is full" if bound == "total" else f"the queue of tenant {tenant!r} is full"
