"""What runs in the next step. Pure and deterministic: sequences, ids and counts; `now` is passed in.

There is no prefill and no decode here: a sequence has known tokens and computed tokens, and every step lets
the computed ones catch up within the budgets (tokens a step, KV blocks, slots).

A step may be planned while the one before it still runs; steps run one after another. `launched` and `landed`
say when a step is on its way and when it is over. What a sequence holds is free when it has ended and the
last step that it is part of is over. Only KV blocks of a preempted sequence pass on at once: the next step
writes to them after the one that runs has read them.

The older of two sequences is the one whose request was accepted first, by whatever scheduler, wherever it
waited since. Rules, in order:

1. Running sequences first. Each that decodes gets its token. The prompts share what is left: half of it is
   for the oldest one, so that it is done whatever else comes, and the other half for those that need least,
   so that short ones do not wait for long ones. Together those that want log-probabilities of their prompts
   get few tokens.
2. When KV blocks run out, the youngest running sequence is preempted: it holds nothing any more and computes
   its tokens anew later. What it delivered stays delivered. Nothing new starts in such a step.
3. Waiting sequences follow, oldest first. One that is not ready (its grammar is being compiled), or whose
   adapter cannot have a slot now or is not in host memory yet, is passed over and holds nothing, and so is
   one whose adapter would be page-in number `max_page_ins` + 1 of the step: everybody in a step waits for its
   page-ins, and so many are done while the step before it runs. One that lacks KV blocks, beside those that
   prompts under way will need, ends the search. When a step has no token left, further ones begin without one
   until `MOST_UNFINISHED` prompts are under way: a short one can have its part of the next step so, and its
   page-in runs meanwhile.
4. Against starvation: once the oldest waiting sequence whose adapter is loaded but has no slot has waited
   `aging_s`, no younger one may join an adapter in use, except those that waited for it when its use began.
   So some slot is idle, at the latest, when all that runs, all that is older and all such have ended; and
   with many adapters for few slots, one that has its turn serves everybody who waits for it.
"""

from bisect import insort
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from executor.batch.blocks import BlockPool
from executor.batch.pace import Load
from executor.batch.sequence import Key, Order, Sequence
from executor.batch.slots import SlotState, SlotTable

# Rows of a step that reach the head for a prompt's log-probabilities, beside one of each sequence: a row of
# logits takes six bytes a token of the vocabulary, and memory is measured with steps that have few of them.
MAX_SCORED = 512
# Prompts that are begun and not done when a step is full, at which no further one begins.
MOST_UNFINISHED = 16
_OLDEST: Order = (float("-inf"), 0)


@dataclass(frozen=True, slots=True)
class PageIn:
    """An adapter that must be in this slot before the step runs; the evicted one ("" for none) is gone, and
    so is what was in the `emptied` slots."""

    slot: int
    digest: str
    evicted: str
    emptied: tuple[int, ...] = ()


@dataclass(slots=True)
class StepPlan:
    num_tokens: dict[Sequence, int] = field(default_factory=dict)
    draws: list[Sequence] = field(default_factory=list)  # those that get a new token, in the same order
    page_ins: list[PageIn] = field(default_factory=list)
    slot_hits: list[str] = field(default_factory=list)  # of each sequence that starts: its adapter had a slot
    preempted: list[Sequence] = field(default_factory=list)
    looked_up: int = 0  # tokens asked of the prefix cache by the sequences that start in this step
    cached: int = 0  # and how many of them it had
    scored: int = 0  # tokens of prompts whose log-probabilities are wanted


class Batcher:
    """Owns the accepted sequences, and what each of them holds in `blocks` and `slots`."""

    def __init__(
        self,
        blocks: BlockPool,
        slots: SlotTable,
        *,
        max_batched_tokens: int,
        max_seats: int,
        max_page_ins: int,
        aging_s: float,
    ) -> None:
        if max_batched_tokens < max_seats:
            raise ValueError(f"{max_batched_tokens} tokens a step are fewer than {max_seats} seats")
        self.blocks = blocks
        self.slots = slots
        self.max_batched_tokens = max_batched_tokens
        self.max_seats = max_seats
        self.max_page_ins = max_page_ins
        self.aging_s = aging_s
        # Both oldest first.
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.sequences: dict[Key, Sequence] = {}
        # Ended, but part of a step that runs: they have no seat any more and still hold blocks and slot.
        self.leaving: list[Sequence] = []
        # Of each slot, the youngest that waited when its use began: who waited for it then may join.
        self._waited_until: list[Order] = [_OLDEST] * len(slots)

    @property
    def free_seats(self) -> int:
        return self.max_seats - len(self.sequences)

    def add(self, sequence: Sequence) -> None:
        """Accept: the caller has checked seats, key and length."""
        self.sequences[sequence.dispatch.key] = sequence
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> bool:
        """End a sequence, wherever it is. True: what it held is free. False: `landed` will free it."""
        del self.sequences[sequence.dispatch.key]
        (self.waiting if sequence.table is None else self.running).remove(sequence)
        if sequence.in_flight:
            self.leaving.append(sequence)
            return False
        self._let_go(sequence)
        return True

    def lives(self, sequence: Sequence) -> bool:
        """Whether it was added and not removed."""
        return self.sequences.get(sequence.dispatch.key) is sequence

    def launched(self, plan: StepPlan) -> None:
        """The planned step is on its way, with what it draws in rows 0, 1, ... of the last tokens."""
        for sequence, count in plan.num_tokens.items():
            sequence.computed += count
            sequence.in_flight += 1
        for row, sequence in enumerate(plan.draws):
            sequence.ahead += 1
            sequence.pending = row

    def landed(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """The step with these is over. Returns the ended ones that hold nothing any more now."""
        for sequence in sequences:
            sequence.in_flight -= 1
        gone = [sequence for sequence in self.leaving if not sequence.in_flight]
        for sequence in gone:
            self.leaving.remove(sequence)
            self._let_go(sequence)
        return gone

    def commit(self, sequence: Sequence, computed: int) -> None:
        """A step that is over has computed so many tokens: offer them to the prefix cache."""
        if sequence.table is not None:
            self.blocks.commit(sequence.table, sequence.token_ids, computed)

    def wanted(self) -> list[str]:
        """Adapters of waiting sequences that have no slot, longest waiting first."""
        return list(
            dict.fromkeys(s.digest for s in self.waiting if s.digest and self.slots.find(s.digest) is None)
        )

    def without_slot(self, digest: str) -> list[Sequence]:
        """Waiting sequences that cannot start before `digest` is in a slot."""
        if self.slots.find(digest) is not None:
            return []
        return [sequence for sequence in self.waiting if sequence.digest == digest]

    def in_slots_to_fill(self) -> list[Sequence]:
        """Running sequences whose page-in was planned and has not ended."""
        loading = {
            slot for slot in self.slots.digests.values() if self.slots.state(slot) is SlotState.LOADING
        }
        return [sequence for sequence in self.running if sequence.slot in loading]

    def load(self, loaded: Container[str]) -> Load:
        """What the next step could have, about: waiting sequences count if they are ready and their adapter
        has a slot, or is among `loaded` and could get one."""
        wanted = [sequence.uncomputed for sequence in self.running]
        prompts = [count for count in wanted if count > 1]
        page_ins = min(self.max_page_ins, len(self.slots) - self.slots.in_use) if self.waiting else 0
        for sequence in self.waiting:
            if not sequence.ready:
                continue
            if sequence.digest and self.slots.find(sequence.digest) is None:
                if not page_ins or sequence.digest not in loaded:
                    continue
                page_ins -= 1
            prompts.append(sequence.uncomputed)
        return Load(wanted.count(1), len(prompts), sum(prompts))

    def plan(self, now: float, loaded: Container[str], most_tokens: int | None = None) -> StepPlan:
        """The next step; `loaded` are the adapters in host memory. Page-ins must be done before it runs.

        `most_tokens`, at least one for each that decodes, makes it shorter than `max_batched_tokens`."""
        plan = StepPlan()
        budget = min(self.max_batched_tokens, most_tokens or self.max_batched_tokens)
        budget = self._plan_running(plan, budget)
        if not plan.preempted:
            self._plan_waiting(plan, budget, now, loaded)
        return plan

    def _plan_running(self, plan: StepPlan, budget: int) -> int:
        """Returns what is left of the budget."""
        shares = self._shares(budget)
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            index += 1
            if sequence not in shares:
                continue
            if _has_computed_nothing(sequence):  # but others may have computed its prefix since it began
                self.blocks.close(sequence.held)
                self._look_up(sequence)
            count = _bounded(plan, sequence, min(shares[sequence], sequence.uncomputed))
            while self.blocks.grow(sequence.held, sequence.computed + count) is None:
                victim = self.running[-1]
                self._preempt(victim, plan)
                if victim is sequence:
                    return budget
            budget -= _give(plan, sequence, count)
        return budget

    def _shares(self, budget: int) -> dict[Sequence, int]:
        """Of running sequences that get tokens: how many, as if there were KV blocks for all."""
        shares, prompts = dict[Sequence, int](), list[Sequence]()
        for sequence in self.running:
            if (uncomputed := sequence.uncomputed) == 1:
                shares[sequence] = 1
            elif uncomputed:
                prompts.append(sequence)
        left = budget - len(shares)
        if not prompts or left <= 0:
            return shares
        shares[prompts[0]] = min(prompts[0].uncomputed, -(-left // 2))
        left -= shares[prompts[0]]
        for sequence in sorted(prompts, key=_uncomputed):
            share = shares.get(sequence, 0)
            more = min(sequence.uncomputed - share, left)
            if more:
                shares[sequence] = share + more
                left -= more
        return shares

    def _plan_waiting(self, plan: StepPlan, budget: int, now: float, loaded: Container[str]) -> None:
        if not self.waiting:
            return
        starving = self._starving(now, loaded)
        unfinished = [s for s in self.running if s.uncomputed > plan.num_tokens.get(s, 0)]
        promised = sum(map(self._missing, unfinished))
        num_unfinished = len(unfinished)
        for sequence in list(self.waiting):
            if budget == 0 and num_unfinished >= MOST_UNFINISHED:
                break
            if not sequence.ready or not self._may_have_slot(sequence, starving, loaded, plan):
                continue
            if not self._open(sequence, plan, promised):
                break
            self._enter_slot(sequence, plan)
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_order)
            if count := _bounded(plan, sequence, min(sequence.uncomputed, budget)):
                self.blocks.grow(sequence.held, sequence.computed + count)
                budget -= _give(plan, sequence, count)
            promised += self._missing(sequence)
            num_unfinished += count < sequence.uncomputed

    def _missing(self, sequence: Sequence) -> int:
        """Blocks that a running sequence will take for all its known tokens and one more."""
        return max(0, self.blocks.blocks_for(len(sequence.token_ids) + 1) - len(sequence.held.block_ids))

    def _starving(self, now: float, loaded: Container[str]) -> Order | None:
        """Place of the oldest waiting sequence that only lacks a slot and has lacked it for too long."""
        for sequence in self.waiting:
            digest = sequence.digest
            if sequence.ready and digest in loaded and self.slots.find(digest) is None:
                return sequence.order if now - sequence.arrived_at >= self.aging_s else None
        return None

    def _may_have_slot(
        self, sequence: Sequence, starving: Order | None, loaded: Container[str], plan: StepPlan
    ) -> bool:
        if not sequence.digest:
            return True
        slot = self.slots.find(sequence.digest)
        if slot is None:
            may_page_in = sequence.digest in loaded and len(plan.page_ins) < self.max_page_ins
            return may_page_in and self.slots.has_place(sequence.digest)
        return starving is None or sequence.order < starving or sequence.order <= self._waited_until[slot]

    def _open(self, sequence: Sequence, plan: StepPlan, promised: int) -> bool:
        """Cached blocks for it, if there is room for all its known tokens and one more, and for what is
        promised to others."""
        self._look_up(sequence)
        if self._missing(sequence) > self.blocks.num_free - promised:
            self._let_go(sequence)
            return False
        return True

    def _look_up(self, sequence: Sequence) -> None:
        dispatch = sequence.dispatch
        sequence.table = self.blocks.open(
            (dispatch.cache_salt, dispatch.digest),
            sequence.token_ids,
            read_cache=dispatch.prompt_logprobs is None,
        )
        sequence.computed = sequence.table.num_cached

    def _enter_slot(self, sequence: Sequence, plan: StepPlan) -> None:
        if not sequence.digest:
            return
        slot = self.slots.find(sequence.digest)
        if slot is None:
            assigned = self.slots.assign(sequence.digest, {waiting.digest for waiting in self.waiting})
            if assigned is None:
                raise RuntimeError("a slot that was free a moment ago is not")
            slot = assigned.slot
            plan.page_ins.append(PageIn(slot, sequence.digest, assigned.evicted, assigned.emptied))
        else:
            plan.slot_hits.append(sequence.digest)
        if not self.slots.users(slot):
            self._waited_until[slot] = self.waiting[-1].order
        self.slots.acquire(slot)
        sequence.slot = slot

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        self.running.remove(sequence)
        self._let_go(sequence)
        insort(self.waiting, sequence, key=_order)
        plan.preempted.append(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        if sequence.table is not None:
            self.blocks.close(sequence.table)
        if sequence.slot >= 0:
            self.slots.release(sequence.slot)
        sequence.table, sequence.slot, sequence.computed = None, -1, 0

    def check(self) -> None:
        """Raise RuntimeError unless what sequences hold is what blocks and slots count."""
        holders = [*self.running, *self.leaving]
        self.blocks.check([s.table for s in holders if s.table is not None])
        self.slots.check()
        uses = [s.slot for s in holders if s.slot >= 0]
        counted = [slot for slot in range(len(self.slots)) for _ in range(self.slots.users(slot))]
        homes = self.slots.digests
        held = all(s.table is None and s.slot == -1 and s.computed == 0 for s in self.waiting)
        placed = all(homes.get(s.digest, -1) == s.slot for s in holders if s.table is not None)
        known = sorted(map(_order, [*self.running, *self.waiting]))
        if sorted(uses) != counted or not held or not placed:
            raise RuntimeError("sequences hold other slots or blocks than the books say")
        if known != sorted(map(_order, self.sequences.values())) or self.free_seats < 0:
            raise RuntimeError("sequences are lost, doubled or too many")
        if any(s.in_flight <= 0 or self.lives(s) for s in self.leaving):
            raise RuntimeError("a sequence that has ended stays for a step that is over")


def _bounded(plan: StepPlan, sequence: Sequence, most: int) -> int:
    """Of `most` tokens, how many may be in the step: one at least, unless `most` is 0."""
    dispatch = sequence.dispatch
    if not most or dispatch.prompt_logprobs is None or sequence.computed >= len(dispatch.prompt_token_ids):
        return most
    count = max(1, min(most, MAX_SCORED - plan.scored))
    plan.scored += count
    return count


def _has_computed_nothing(sequence: Sequence) -> bool:
    """What a running sequence holds is what the prefix cache had."""
    return sequence.computed == sequence.held.num_cached


def _give(plan: StepPlan, sequence: Sequence, count: int) -> int:
    if _has_computed_nothing(sequence):
        plan.looked_up += len(sequence.token_ids)
        plan.cached += sequence.computed
        if not sequence.started:
            sequence.cached_prompt_tokens = min(sequence.computed, len(sequence.dispatch.prompt_token_ids))
        sequence.started = True
    plan.num_tokens[sequence] = count
    if sequence.computed + count == sequence.length:
        plan.draws.append(sequence)
    return count


def _order(sequence: Sequence) -> Order:
    return sequence.order


def _uncomputed(sequence: Sequence) -> int:
    return sequence.uncomputed
