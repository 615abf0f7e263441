"""The life of accepted requests: into the queue, back there on failure, on to their clients."""

import asyncio
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence

import grpc

from lorafleet.v1 import common_pb2, executor_pb2
from scheduler.admission.admission import AdmittedRequest
from scheduler.dispatch import rejections
from scheduler.dispatch.blame import Blame
from scheduler.dispatch.forecasts import Forecasts
from scheduler.dispatch.journal import Journal
from scheduler.dispatch.live_request import LiveRequest
from scheduler.dispatch.live_requests import LiveRequests
from scheduler.dispatch.planner import Planner
from scheduler.dispatch.planning import Planning
from scheduler.dispatch.policy import Policy
from scheduler.dispatch.queue import Queue
from scheduler.dispatch.reader_line import ReaderLine
from scheduler.dispatch.reaper import Reaper
from scheduler.dispatch.room import Room
from scheduler.dispatch.settings import DispatcherSettings
from scheduler.dispatch.trials import Trials
from scheduler.dispatch.waits import Waits
from scheduler.errors import (
    DeadlineExceeded,
    Draining,
    NoExecutor,
    SchedulerError,
    StoreUnavailable,
    Superseded,
    from_exception,
)
from scheduler.fleet.fleet import Fleet
from scheduler.fleet.link import LinkSettings
from scheduler.fleet.wire import Tokens
from scheduler.metrics import Metrics
from scheduler.tenants.limits import TenantLimits
from scheduler.tenants.quotas import Quotas
from scheduler.tenants.tenants import Tenants
from scheduler.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Dispatcher:
    """Owns queue, policy and fleet. Everything runs on one event loop, so nothing here is locked."""

    def __init__(
        self,
        settings: DispatcherSettings,
        link_settings: LinkSettings,
        tokenizer: Tokenizer,
        metrics: Metrics,
        clock: Callable[[], float],
        data_loss: Callable[[str, str], None] = lambda adapter, digest: None,
        awake: Callable[[], float] | None = None,
        tenants: Tenants | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        """`data_loss` is told which version's bytes an executor found damaged. `awake` is a clock that runs
        only while this loop is alive (scheduler/heartbeat.py): executors are waited for on it."""
        tenants = tenants or Tenants(TenantLimits(max_queued=settings.max_queued_per_tenant))
        self.queue = Queue(
            settings.max_queued,
            tenants.max_queued,
            settings.prompt_token_price,
            settings.priority_aging_s,
            tenants.weight,
        )
        self._awake = awake or clock
        links_awake = awake or asyncio.get_running_loop().time
        self.fleet = Fleet(settings.fleet, link_settings, self, links_awake)
        self._blame = Blame(self.fleet)
        self.line = ReaderLine()
        self.draining = False
        self._settings = settings
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._forecasts = Forecasts(self.queue, self.fleet.index, settings, metrics)
        self._journal = Journal(metrics, self._forecasts)
        self._clock = clock
        self._data_loss = data_loss
        self._numbers = itertools.count(1)
        self._accepted = LiveRequests()
        self.room = Room(self.queue, self._accepted, tenants, quotas or Quotas(tenants.limits), clock)
        policy = Policy(self.queue, self.fleet.index, settings.aging_s, salt=random.getrandbits(32))
        self._planning = Planning(self.queue, policy)
        self._planner = Planner(
            self._planning,
            self.fleet,
            self._accepted,
            metrics,
            self._journal,
            clock,
            settings.plan_pause_s,
            fail=lambda live, error: self._fail(live, from_exception(error)),
        )
        patience = settings.queue_timeout_s
        self._reaper = Reaper(self.queue, self.fleet, self._accepted, patience, self._fail)
        self._waits = Waits(self.queue, self._reaper)
        self._trials = Trials(
            self.fleet, self._accepted, self._planner, metrics, patience, self._fail, clock, self._awake
        )
        self._sweeper: asyncio.Task[None] | None = None

    # Beginning and end.

    def start(self) -> None:
        self.on_phase()  # Metrics tell of every executor before the first one answers.
        self.fleet.start()
        self._sweeper = asyncio.create_task(self._sweep_for_ever(), name="sweep")

    async def stop(self) -> None:
        """Fails what is still live and closes all streams."""
        self.draining = True
        for live in self._accepted:
            self._fail(live, Draining())
        if self._sweeper:
            self._sweeper.cancel()
        await self.fleet.stop()

    async def drain(self, timeout_s: float) -> bool:
        """Takes nothing new and waits for what was accepted. Whether all of it ended in time."""
        self.draining = True
        try:
            await asyncio.wait_for(self._accepted.wait_empty(), timeout_s)
        except TimeoutError:
            logger.warning("%d requests have not ended within the drain timeout", self.num_live)
            return False
        return True

    @property
    def num_live(self) -> int:
        return len(self._accepted)

    # What operators cause.

    def live_versions(self) -> Counter[tuple[str, str]]:
        """Accepted requests by ("tenant/name", digest)."""
        return self._accepted.versions()

    def fail_version(self, adapter: str, digest: str, error: SchedulerError) -> None:
        """Ends all accepted requests of a version."""
        for live in self._accepted.of_version(adapter, digest):
            self._fail(live, error)

    # What clients cause.

    def submit(
        self, admitted: AdmittedRequest, deadline_s: float | None, *, again: bool = False
    ) -> LiveRequest:
        """Accepts a request; `deadline_s` is what its caller leaves it. Raises why it is not accepted.

        `again`: it was accepted before, by a scheduler that was lost. Those that wait may be twice as many,
        so that new ones do not take the room that was theirs.
        """
        if self.draining:
            raise Draining()
        if deadline_s is not None and deadline_s <= 0:
            raise DeadlineExceeded("the deadline had passed before the request was accepted")
        if refusals := self.fleet.refusals():
            raise NoExecutor(refusals)
        live = LiveRequest(admitted, next(self._numbers), self._tokenizer, self._clock(), self.line)
        live.served_at = self._awake()
        if not self._may_ever_run(live):
            raise self._reaper.why_never(live)
        self._enqueue_new(live, deadline_s, again)
        former = self._accepted.named(live.key)
        if former:
            self._fail(former, Superseded(admitted.request_id))
        self._register(live, deadline_s)
        return live

    def cancel(self, live: LiveRequest) -> None:
        """Its client is gone, or wants no more: frees everything at once. Nothing when it has ended."""
        self._end(live, grpc.StatusCode.CANCELLED.name)

    def _enqueue_new(self, live: LiveRequest, deadline_s: float | None, again: bool) -> None:
        self.room.check_places(live.waiting.tenant, live.admitted.request_id, again=again, enters=True)
        if not again:  # What was accepted is not refused for what it would take.
            self._forecasts.check(live, deadline_s)
        self.room.take(live, again=again)
        self._planning.arrive(live.waiting)

    def _register(self, live: LiveRequest, deadline_s: float | None) -> None:
        self._accepted.add(live)
        self._journal.accepted(live, self.num_live)
        limit_s = live.time_limit_left_s(self._clock())
        times = [time for time in (deadline_s, limit_s) if time is not None]
        if times:
            by_limit = limit_s is not None and limit_s == min(times)
            live.timer = asyncio.get_running_loop().call_later(min(times), self._time_up, live, by_limit)
        if complete := live.complete:
            self._finish(live, complete)
        self._planner.wake()

    def _time_up(self, live: LiveRequest, by_limit: bool) -> None:
        if by_limit:
            self._finish(live, common_pb2.FINISH_REASON_TIME_LIMIT)
        else:
            self._fail(live, DeadlineExceeded("the deadline passed"))

    # What executors cause (scheduler.fleet.link.Listener).

    def on_tokens(self, name: str, step: Sequence[Tokens]) -> None:
        now, made, gaps = self._clock(), Counter[tuple[str, str, str]](), Counter[float]()
        for tokens in step:
            live = self._accepted.running(tokens.dispatch_id)
            if live is None:
                continue  # Of an attempt that is over.
            if not live.progress.accept(tokens.first_index, tokens.token_ids):
                self.fleet.cancel(name, tokens.dispatch_id)
                why = f"token {tokens.first_index} does not follow the last one"
                self._attempt_failed(live, "TOKEN_GAP", why)
                continue
            made[live.account] += len(tokens.token_ids)
            try:
                self._deliver(live, tokens, now, gaps)
            except Exception as error:  # A bug with one request's text must not end the streams beside it.
                self._fail(live, from_exception(error))
        for (tenant, _, digest), count in made.items():
            self.queue.charge(tenant, digest, count)
        self._journal.step(made, gaps)

    def on_finished(self, finished: executor_pb2.Finished) -> None:
        live = self._accepted.running(finished.dispatch_id)
        if live is None:
            return
        if not finished.reason:
            self._attempt_failed(live, "BAD_END", "it ended without a reason")
            return
        live.cached_prompt_tokens = max(live.cached_prompt_tokens, finished.cached_prompt_tokens)
        self._finish(live, finished.reason)

    def on_rejected(self, name: str, rejected: executor_pb2.Rejected) -> None:
        live = self._accepted.running(rejected.dispatch_id)
        if live is None:
            return
        if rejected.retryable:
            pause_s = self._settings.retry_pause_s * 2**live.failures
            self._attempt_failed(live, rejected.reason, rejected.message, pause_s)
            return
        error = rejections.error_of(live, name, rejected)
        adapter, digest = live.admitted.adapter, live.admitted.digest
        is_told = live.refusal is not None and live.refusal.code is error.code
        if error.code is grpc.StatusCode.DATA_LOSS and adapter and not is_told:
            self._data_loss(adapter, digest)
        if rejected.reason in rejections.LOCAL_REASONS:
            live.refuse(name, error)
            if self._may_ever_run(live):
                self._attempt_failed(live, rejected.reason, rejected.message)
                return
        self._blame.failed(live, rejected.reason)
        self._fail(live, error)

    def on_lost(self, name: str, dispatch_ids: list[str], why: str, *, crashed: bool) -> None:
        for live in filter(None, map(self._accepted.running, dispatch_ids)):
            if crashed and (guilt := self._trials.crashed(live, why)):
                self._fail(live, guilt)
            else:
                self._attempt_failed(live, rejections.EXECUTOR_LOST, f"executor {name}: {why}")

    def on_room(self) -> None:
        self._trials.begin()
        self._planner.wake()

    def on_phase(self) -> None:
        self.fleet.guard()
        self._metrics.executors(state.condition for state in self.fleet.states)
        self._reaper.phase_changed(self._awake())
        self._trials.tend()
        self._planner.wake()

    def _deliver(self, live: LiveRequest, tokens: Tokens, now: float, gaps: Counter[float]) -> None:
        live.failures = 0
        if not live.proven:
            self._trials.proven(live)
            self._blame.served(live)
        if live.last_token_at is None:
            self._journal.first_token(live, now)
        else:
            gaps[now - live.last_token_at] += 1
        live.last_token_at = now
        if tokens.prompt_logprobs:
            live.progress.has_prompt_logprobs = True
            live.outbox.put_prompt_logprobs(tokens.prompt_logprobs)
        if live.push(tokens.token_ids, tokens.logprobs):
            self._finish(live, common_pb2.FINISH_REASON_STOP)

    def _attempt_failed(self, live: LiveRequest, reason: str, why: str, pause_s: float = 0.0) -> None:
        """Back to its former place in the queue, or to its client when it has failed too often.

        The pause is for what does not pass in a moment, such as a store that is away: without one all
        attempts would be used up at once. The loss of an executor is no failure: see trials.py.
        """
        self._trials.end(live)
        self._blame.failed(live, reason)
        self._accepted.end_attempt(live)
        live.served_at = self._awake()
        if live.proven:
            live.waits_since = self._clock()
        self._journal.attempt_failed(live, reason, why)
        if reason not in rejections.BUSY_REASONS:
            live.failures += reason != rejections.EXECUTOR_LOST
            live.avoid(live.address)
        if complete := live.complete:
            self._finish(live, complete)
        elif live.failures >= self._settings.max_attempts:
            kind = StoreUnavailable if reason == rejections.STORE_UNAVAILABLE else NoExecutor
            gave_up = kind(f"gave up after {live.failures} failed attempts; the last: {why}")
            self._fail(live, live.refusal if live.refusal and reason in rejections.LOCAL_REASONS else gave_up)
        elif pause_s and reason not in rejections.BUSY_REASONS:
            live.pause = asyncio.get_running_loop().call_later(pause_s, self._put_back, live)
        else:
            self._put_back(live)

    def _may_ever_run(self, live: LiveRequest) -> bool:
        self.queue.follow(self.fleet.index.lengths)
        return self.fleet.index.may_ever_run(self.queue.needs(live.waiting))

    def _put_back(self, live: LiveRequest) -> None:
        live.pause = None
        if not self._trials.take(live):
            self.queue.put_back(live.waiting, live.waits_since)
        self._planner.wake()

    # Ends.

    def _finish(self, live: LiveRequest, reason: common_pb2.FinishReason) -> None:
        if live.ended:
            return
        try:
            live.flush()
        except Exception as error:  # A bug with one request's text must not leave it without an end.
            self._fail(live, from_exception(error))
            return
        live.outbox.finish(reason)
        self._end(live, grpc.StatusCode.OK.name)

    def _fail(self, live: LiveRequest, error: SchedulerError) -> None:
        if live.ended:
            return
        live.outbox.fail(error)
        self._end(live, error.code.name)

    def _end(self, live: LiveRequest, code: str) -> None:
        """Leaves nothing of a request behind, wherever it was."""
        if live.ended:
            return
        live.ended = True
        for timer in (live.timer, live.pause):
            if timer:
                timer.cancel()
        self.queue.discard(live.waiting.number)
        self._trials.end(live)
        if live.dispatch_id:
            self.fleet.cancel(live.address, live.dispatch_id)
        self._accepted.end_attempt(live)
        self._accepted.remove(live)
        self.room.ended(live)
        self._journal.ended(live, code, self.num_live, self._clock())

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.sweep_interval_s)
            try:
                self.sweep()
            except Exception:
                logger.exception("a sweep failed; the next one tries again")

    def sweep(self) -> None:
        """Ends requests that waited too long for an executor, and looks after what comes with time."""
        now, awake = self._clock(), self._awake()
        self.queue.age(now)
        self.fleet.tend()
        self._reaper.sweep(awake)
        self._trials.tend()
        self._planner.tend()
        self._metrics.oldest_waits(self._waits.longest(now))
        self._planner.wake()

    def check(self) -> None:
        """Raises AssertionError when a request is in two places, in none, or left behind."""
        self.queue.check()
        self._accepted.check(
            waiting=[*self._trials.waiting(), *(request.number for request in self.queue.requests())],
            sent=[dispatch_id for state in self.fleet.states for dispatch_id in state.dispatch_ids()],
        )
        for state in self.fleet.states:
            state.check()
