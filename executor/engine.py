"""The engine: accepted dispatches in, tokens out, one mixed batch a step. It belongs to one thread.

With `steps_ahead` 1 a step is planned and launched while the one before it runs; what is drawn there is known
on the device only. The draw of a step with guided answers waits until the one before it has landed, and then
comes before the next launch: their masks follow from all tokens before, which are filled in while the step's
rows run. So a sequence that ends may be part of one more step: what that step draws for it is
dropped, and its blocks, slot and adapter are free when that step is over.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from executor.adapters.drops import DropKey
from executor.adapters.pager import Pager
from executor.adapters.residency import Copy, Tier
from executor.batch.admission import check_fits
from executor.batch.batcher import Batcher, StepPlan
from executor.batch.pace import Pace
from executor.batch.rates import RateMeter
from executor.batch.sampling import SampledToken
from executor.batch.sequence import Dispatch, FinishReason, Key, Sequence, StopLimits
from executor.errors import InvalidDispatch
from executor.events import EngineInfo, NewToken, Status, StepEvents
from executor.guides.guides import Guides
from executor.metrics import Metrics
from executor.outcomes import Outcomes
from executor.rejection import Rejection, draining, internal, no_seats, no_token, rejection_of
from executor.step.model_runner import Forward, Launched, ModelRunner, ShareResult
from executor.step.trace import NO_TRACE, Trace, TracedStep


@dataclass(slots=True)
class _Flight:
    """A step on its way. A draw may be owed to it: then no step is behind it."""

    plan: StepPlan
    step: Forward | Launched
    launched_at: float  # when its planning began
    launch_s: float  # what the host took to plan and launch it
    traced: TracedStep | None


class Engine:
    """Commands take effect at once, their outcomes are in the events of the next `step` (or `fail`).

    Made by `executor.build.build_engine`; drive it from one thread, here or through EngineThread.
    """

    def __init__(
        self,
        info: EngineInfo,
        runner: ModelRunner,
        batcher: Batcher,
        pager: Pager[Any],
        guides: Guides,
        limits: StopLimits,
        vocab_size: int,
        metrics: Metrics,
        clock: Callable[[], float],
        pace: Pace,
        meter: RateMeter,
        *,
        steps_ahead: int = 0,
        trace: Trace = NO_TRACE,
    ) -> None:
        self.info = info
        self.batcher = batcher
        self.pager = pager
        self._runner = runner
        self._guides = guides
        self._limits = limits
        self._vocab_size = vocab_size
        self._metrics = metrics
        self._clock = clock
        self._steps_ahead = steps_ahead
        self._trace = trace
        self._pace = pace
        self._meter = meter
        self._flights: deque[_Flight] = deque()  # launched and not over, oldest first
        self._draining = False
        self._plan = StepPlan()  # of the step that is being launched or landed: what fails when that raises
        self._steps = 0
        self._landed_at = 0.0
        self._arrivals = 0
        self._outcomes = Outcomes(metrics)

    def step(self) -> StepEvents:
        """One heartbeat. When it raises, call `fail` with the exception before anything else."""
        self._trace.beat_begins()
        self._plan = StepPlan()
        for flight in self._flights:
            self._draw(flight)
        self._settle(now := self._clock())
        plan = self._plan = self._next_plan(now)
        self._page_in(plan)
        if plan.num_tokens:
            self._launch(plan, now)
        landing = len(self._flights) - (self._steps_ahead if plan.num_tokens else 0)
        for _ in range(landing):
            self._land(self._flights.popleft())
        return self._emit(ran=landing > 0)

    def add(self, dispatch: Dispatch) -> None:
        """Accept or reject; either way the events say how it ends."""
        rejection = self._refusal(dispatch)
        if rejection is not None:
            self._outcomes.rejected(dispatch, rejection)
            return
        self._arrivals += 1
        sequence = Sequence(dispatch, self._arrivals, self._clock(), self._limits.max_length(dispatch))
        reason = self._limits.finished(sequence)
        if reason is not None:
            self._outcomes.finished(sequence, reason)
            return
        self.batcher.add(sequence)
        self._guides.begin(sequence)
        if dispatch.digest:
            self.pager.acquire(dispatch.digest)

    def cancel(self, key: Key) -> None:
        """Free everything of a dispatch, as soon as no step runs with it; no event follows. Unknown keys are
        ignored."""
        sequence = self.batcher.sequences.get(key)
        if sequence is not None:
            self._let_go(sequence)
            self._metrics.dispatch_ended("cancelled")

    def prefetch(self, digest: str, in_s: float = 0.0, uses: int = 1) -> None:
        """It will be needed in so many seconds by so many dispatches, about."""
        self.pager.prefetch(digest, self._clock() + in_s, uses)

    def pin(self, digest: str, tier: Tier, adapter: str = "") -> None:
        self.pager.pin(digest, tier, adapter)

    def unpin(self, digest: str, adapter: str = "") -> None:
        self.pager.unpin(digest, adapter)

    def drop(self, digest: str, adapter: str = "", key: DropKey | None = None) -> None:
        """The events have `key` once it is done."""
        self.pager.drop(digest, adapter, key)

    def discarded(self, digest: str) -> None:
        self.pager.discarded(digest)

    def on_disk(self, copies: tuple[Copy, ...]) -> None:
        self.pager.on_disk(copies)

    def drain(self) -> None:
        """Reject what comes from now on; what is accepted goes on."""
        self._draining = True

    def fail(self, error: Exception) -> StepEvents:
        """After a step that raised: reject the sequences in it and make the books balance again.

        Sequences that were not in it go on. What a step that still ran brings counts, for all. If there was
        no plan yet, whatever runs is rejected, or else whatever waits: something among it makes planning
        fail.
        """
        rejection, plan = internal(error), self._plan
        while self._flights:
            self._land_or_reject(self._flights.popleft())
        self._reject_all(list(plan.num_tokens or self.batcher.running or self.batcher.waiting), rejection)
        self._reject_all(self.batcher.in_slots_to_fill(), rejection)  # they have begun without a token
        self.pager.abandon_loading()
        self._plan = StepPlan()
        return self._emit(ran=False)

    def close(self) -> None:
        """Stop the threads that load and make guides, and end the other ranks."""
        self.pager.close()
        self._guides.close()
        self._runner.close()
        self._trace.close()

    def check(self) -> None:
        """Raise RuntimeError unless all books balance: blocks, slots, seats, adapter users."""
        self.batcher.check()
        self.pager.check()
        holders = [*self.batcher.sequences.values(), *self.batcher.leaving]
        steps = Counter(sequence for flight in self._flights for sequence in flight.plan.num_tokens)
        if any(sequence.in_flight != steps[sequence] for sequence in {*holders, *steps}):
            raise RuntimeError("sequences are in other steps than the books say")
        users = Counter(sequence.digest for sequence in holders if sequence.digest)
        if users != self.pager.users():
            raise RuntimeError(f"adapters are used by {users}, counted {self.pager.users()}")

    def _next_plan(self, now: float) -> StepPlan:
        loaded = self.pager.host
        return self.batcher.plan(now, loaded, self._pace.most_tokens(self.batcher.load(loaded)))

    def _settle(self, now: float) -> None:
        """What happened since the last step: time limits that passed, guides made, loads that ended."""
        for sequence in list(self.batcher.sequences.values()):
            deadline = sequence.dispatch.deadline
            if deadline is not None and now >= deadline:
                self._finish(sequence, FinishReason.TIME_LIMIT)
        for made in self._guides.collect():
            if made.failure:
                self._reject(made.sequence, rejection_of(made.failure))
            self._end_by_guide(made.sequence)
        for failure in self.pager.collect(self.batcher.wanted(), now):
            for sequence in self.batcher.without_slot(failure.digest):
                self._reject(sequence, failure.rejection)
        self._trace.lap("settle")

    def _page_in(self, plan: StepPlan) -> None:
        self._trace.lap("plan")
        self.pager.page_in(plan.page_ins)
        self._trace.lap("page_in")

    def _launch(self, plan: StepPlan, now: float) -> None:
        forward = self._runner.launch_forward(plan)
        owed = self._guides.guide_any(plan.draws)
        step = forward if owed else self._runner.launch_draw(forward)
        self.batcher.launched(plan)
        launch_s = self._clock() - now
        traced = self._trace.launched(plan, self.batcher, self.pager)
        if not owed:
            self._trace.drawn(traced)
        self._flights.append(_Flight(plan, step, now, launch_s, traced))

    def _draw(self, flight: _Flight) -> Launched:
        """If that is owed: all steps before it have landed. Who has ended meanwhile draws whatever comes."""
        if isinstance(flight.step, Launched):
            return flight.step
        self._plan = flight.plan
        masks = self._guides.masks(flight.plan.draws)
        self._trace.lap("mask")
        flight.step = launched = self._runner.launch_draw(flight.step, masks)
        self._trace.drawn(flight.traced)
        for sequence in flight.plan.draws:
            self._end_by_guide(sequence)  # whose mask was too much
        return launched

    def _land(self, flight: _Flight) -> None:
        """Wait for the oldest step, take in what it brought, and let go of those who have ended meanwhile."""
        self._plan = flight.plan
        told = len(self._outcomes.tokens)
        try:
            self._take_in(flight)
        except Exception as error:
            # Now: what the step behind it draws for them does not follow the tokens that are known.
            self._reject_all(flight.plan.num_tokens, internal(error))
            raise
        now, begin = self._clock(), max(flight.launched_at, self._landed_at)
        rows, drawn = sum(flight.plan.num_tokens.values()), len(self._outcomes.tokens) - told
        self._metrics.step_done(flight.plan, drawn, now - begin)
        self._meter.step(rows, len(flight.plan.draws), now - begin)
        self._observe(flight, now)
        self._trace.lap("apply")
        self._trace.landed(flight.traced, now - begin)
        self._landed_at = now
        self._steps += 1

    def _observe(self, flight: _Flight, now: float) -> None:
        """One ahead, a step takes as long as the host or the device needs for it. Where the launch of the
        step behind it was by far the longer one, its end was only seen when that was over, which tells
        nothing of it."""
        launched = flight.launched_at + (flight.launch_s if self._steps_ahead else 0.0)
        seconds = max(flight.launch_s, now - max(launched, self._landed_at))
        behind = self._flights[0].launch_s if self._flights else 0.0
        if behind - flight.launch_s <= seconds / 2:
            rows = sum(flight.plan.num_tokens.values())
            self._pace.times.observe(rows, rows == len(flight.plan.num_tokens), seconds)

    def _take_in(self, flight: _Flight) -> None:
        try:
            results = self._runner.collect(self._draw(flight))
        finally:
            self._trace.lap("wait")
            for sequence in self.batcher.landed(flight.plan.num_tokens):
                self._release(sequence)
        for result in results:
            if self.batcher.lives(result.sequence):
                self._apply(result)

    def _land_or_reject(self, flight: _Flight) -> None:
        try:
            self._land(flight)
        except Exception as error:
            self._reject_all(flight.plan.num_tokens, internal(error))

    def _apply(self, result: ShareResult) -> None:
        sequence = result.sequence
        if result.failure is not None:
            guided = self._guides.of(sequence) is not None
            of = (self.info.model_name, self.info.model_dtype, sequence.digest)
            self._reject(sequence, no_token(result.failure, guided, *of))
            return
        sequence.prompt_scores += result.scores
        self.batcher.commit(sequence, result.computed)
        if result.drawn is not None:
            self._append(sequence, result.drawn)

    def _append(self, sequence: Sequence, drawn: SampledToken) -> None:
        dispatch = sequence.dispatch
        first = sequence.num_outputs == len(dispatch.output_token_ids)
        scores = tuple(sequence.prompt_scores) if first else ()
        wanted = dispatch.sampling.logprobs is not None
        self._outcomes.tokens.append(NewToken(dispatch.key, sequence.num_outputs, drawn, wanted, scores))
        sequence.append(drawn.token_id)
        self._guides.advance(sequence, drawn.token_id)
        if self._end_by_guide(sequence):
            return
        reason = self._limits.finished(sequence)
        if reason is not None:
            self._finish(sequence, reason)

    def _refusal(self, dispatch: Dispatch) -> Rejection | None:
        if self._draining:
            return draining()
        if dispatch.key in self.batcher.sequences:
            return rejection_of(InvalidDispatch(f"dispatch_id {dispatch.key[1]!r} is used already"))
        if self.batcher.free_seats <= 0:
            return no_seats(self.batcher.max_seats)
        try:
            check_fits(dispatch, self.info.max_model_len, self._vocab_size)
            self._guides.check(dispatch)
        except InvalidDispatch as error:
            return rejection_of(error)
        return None

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._let_go(sequence)
        self._outcomes.finished(sequence, reason)

    def _end_by_guide(self, sequence: Sequence) -> bool:
        guide = self._guides.of(sequence)
        if guide is None or not self.batcher.lives(sequence):
            return False
        if guide.failure:
            self._reject(sequence, rejection_of(guide.failure))
        elif guide.ended:
            self._finish(sequence, FinishReason.STOP)
        return bool(guide.failure or guide.ended)

    def _reject(self, sequence: Sequence, rejection: Rejection) -> None:
        self._let_go(sequence)
        self._outcomes.rejected(sequence.dispatch, rejection)

    def _reject_all(self, sequences: Iterable[Sequence], rejection: Rejection) -> None:
        """Those of them that have not ended."""
        for sequence in filter(self.batcher.lives, sequences):
            self._reject(sequence, rejection)

    def _let_go(self, sequence: Sequence) -> None:
        self._guides.drop(sequence)
        if self.batcher.remove(sequence):
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.digest:
            self.pager.release(sequence.digest)

    def _emit(self, *, ran: bool) -> StepEvents:
        residency = self.pager.take_delta()
        for gone in residency.removed if residency else ():
            if not self.pager.holds(gone.digest):
                self._metrics.adapter_gone(gone.digest)
                self.batcher.blocks.evict_first(gone.digest)
        tokens, finished, rejected = self._outcomes.take()
        events = StepEvents(
            step=self._steps,
            ran=ran,
            runs=bool(self._flights),
            tokens=tokens,
            finished=finished,
            rejected=rejected,
            residency=residency,
            status=self._status(),
            dropped=self.pager.take_dropped(),
        )
        self._trace.beat_over()
        return events

    def _status(self) -> Status:
        batcher, pager = self.batcher, self.pager
        return Status(
            draining=self._draining,
            running=len(batcher.running),
            waiting=sum(not sequence.started for sequence in batcher.waiting),
            free_seats=batcher.free_seats,
            free_kv_blocks=batcher.blocks.num_free,
            free_slots=pager.free_slots(),
            slots_in_use=batcher.slots.in_use,
            loading=pager.num_loading,
            host_bytes=pager.host.num_bytes,
            running_by_digest=_by_digest(batcher.running),
            waiting_by_digest=_by_digest(batcher.waiting),
            rates=self._meter.rates(batcher.sequences.values(), self._clock()),
        )


def _by_digest(sequences: Iterable[Sequence]) -> tuple[tuple[str, int], ...]:
    return tuple(Counter(sequence.digest for sequence in sequences if sequence.digest).items())
