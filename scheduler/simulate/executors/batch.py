"""What runs in the next step of a simulated executor, as executor/batch/batcher.py plans it. Pure.

Only counts are kept. Those that decode need no look at each: they have a token a step, and how many of them
need a further KV block is counted by the place of their last token in its block. So a step costs what it has
of prompts, and steps in which nothing but decoding happens can be skipped over (`quiet_steps`).

A step may be planned while the one before it runs; `landed` says that one is over.
"""

from bisect import insort
from collections.abc import Container

from scheduler.simulate.executors.kv import Kv
from scheduler.simulate.executors.sequence import NEVER, Sequence
from scheduler.simulate.executors.slots import Slots
from scheduler.simulate.executors.step_plan import StepPlan

MOST_UNFINISHED = 16  # Prompts that are begun when a step is full, at which no further one begins.
_OLDEST = (float("-inf"), 0)


class Batch:
    """The accepted sequences of one executor, and what each holds."""

    def __init__(
        self,
        kv: Kv,
        slots: Slots,
        *,
        max_batched_tokens: int,
        max_page_ins: int,
        aging_s: float,
    ) -> None:
        self.kv = kv
        self.slots = slots
        self.max_batched_tokens = max_batched_tokens
        self.max_page_ins = max_page_ins
        self.aging_s = aging_s
        self.sequences: dict[str, Sequence] = {}
        self.waiting: list[Sequence] = []  # The oldest first, as the next ones.
        self.running: list[Sequence] = []
        self.prompts: list[Sequence] = []  # Those of the running ones that do not decode.
        self.step = 0  # That was planned last.
        self.num_decoding = 0  # In the next step.
        self.decoding_tokens = 0  # Places in the KV cache that they take after the last planned step.
        self._grow_at = [0] * kv.block_size  # Of them: at which steps, by remainder, they need a block.
        self._ends: dict[int, dict[Sequence, None]] = {}  # By the step that draws their last token.
        self._leaving: dict[int, list[Sequence]] = {}  # Ended, by the last step that they are part of.
        self._waited_until = [_OLDEST] * len(slots)

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.dispatch_id] = sequence
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence, landed: int) -> bool:
        """Ends it. Whether what it held is free; else `landed` says so of it when its last step is over.
        `landed` is the last step that is over."""
        del self.sequences[sequence.dispatch_id]
        if not sequence.runs:
            self.waiting.remove(sequence)
            return True
        self._stop(sequence)
        if sequence.in_step > landed:
            self._leaving.setdefault(sequence.in_step, []).append(sequence)
            return False
        self._let_go(sequence)
        return True

    def landed(self, step: int) -> tuple[list[Sequence], list[Sequence]]:
        """A step is over: those that had their last token in it, and those ended before that held on until
        now. Both hold nothing any more."""
        gone = self._leaving.pop(step, [])
        for sequence in gone:
            self._let_go(sequence)
        ended = list(self._ends.pop(step, ()))
        for sequence in ended:
            del self.sequences[sequence.dispatch_id]
            if sequence.runs:
                self.running.remove(sequence)
                self._let_go(sequence)
            else:  # It was preempted meanwhile.
                self.waiting.remove(sequence)
        return ended, gone

    def wanted(self) -> list[str]:
        """Adapters of waiting sequences that have no slot, the longest waiting first."""
        find = self.slots.find
        return list(dict.fromkeys(s.digest for s in self.waiting if s.digest and find(s.digest) is None))

    @property
    def next_end(self) -> int | None:
        """The step in which the next sequence ends, as far as is known."""
        return min(self._ends, default=None)

    def quiet_steps(self) -> int:
        """How many steps may follow the one that was planned last, in which those that decode go on and
        nothing else happens; unless something comes from outside, or one of their steps ends a sequence."""
        if self.prompts or self._leaving or not self.num_decoding:
            return 0
        size = self.kv.block_size
        return self.kv.num_free // self.num_decoding * size

    def skip(self, steps: int) -> None:
        """So many quiet steps are planned at once; none of those that decode may be done before the last."""
        size = self.kv.block_size
        for later in range(1, min(steps, size) + 1):
            needing = self._grow_at[(self.step + later) % size]
            if needing:
                self.kv.take(needing * (1 + (steps - later) // size))
        self.step += steps
        self.decoding_tokens += steps * self.num_decoding
        for sequence in self._done_decoding():
            self._end_decoding(sequence)

    def plan(self, now: float, loaded: Container[str], most_tokens: int | None = None) -> StepPlan:
        """The next step; `loaded` are the adapters in host memory."""
        plan = StepPlan(self.step + 1)
        budget = min(self.max_batched_tokens, most_tokens or self.max_batched_tokens)
        budget -= self._plan_running(plan, budget)
        if not plan.preempted:
            self._plan_waiting(plan, budget, now, loaded)
        if not plan.is_empty:
            self._launch(plan)
        return plan

    # Those that run.

    def _plan_running(self, plan: StepPlan, budget: int) -> int:
        """How many tokens they have."""
        shares = self._shares(budget - self.num_decoding)
        size = self.kv.block_size
        needed = self._grow_at[plan.step % size]
        for sequence, share in shares.items():
            needed += self.kv.blocks_for(sequence.computed + share) - sequence.blocks
        if needed > self.kv.num_free:
            return self._plan_short(plan, shares)
        self.kv.take(self._grow_at[plan.step % size])
        plan.decoding = self.num_decoding
        for sequence in self.prompts:
            if share := shares.get(sequence, 0):
                self._give(plan, sequence, share)
        return plan.decoding + sum(shares.values())

    def _plan_short(self, plan: StepPlan, shares: dict[Sequence, int]) -> int:
        """The same where KV blocks run out: the youngest lose theirs, one after the other."""
        spent, index = 0, 0
        while index < len(self.running):
            sequence = self.running[index]
            index += 1
            if sequence.decodes:
                share, wanted = 1, sequence.length(plan.step)
                if sequence.ends_in < plan.step:
                    continue
            elif share := shares.get(sequence, 0):
                wanted = sequence.computed + share
            else:
                continue
            while (missing := self.kv.blocks_for(wanted) - self._held(sequence, plan)) > self.kv.num_free:
                victim = self.running[-1]
                self._preempt(victim, plan)
                if victim is sequence:
                    return spent
            spent += share
            if sequence.decodes:
                if missing > 0:
                    self.kv.take(missing)
                sequence.in_step = plan.step
                plan.decoding += 1
            else:
                self._give(plan, sequence, share)
        return spent

    def _held(self, sequence: Sequence, plan: StepPlan) -> int:
        if not sequence.decodes:
            return sequence.blocks
        known = plan.step if sequence.in_step == plan.step else plan.step - 1
        return self.kv.blocks_for(sequence.length(min(known, sequence.ends_in)))

    def _shares(self, left: int) -> dict[Sequence, int]:
        """The shares of prompts that get tokens: how many."""
        shares, several = dict[Sequence, int](), list[Sequence]()
        for sequence in self.prompts:
            if sequence.uncomputed == 1:
                shares[sequence] = 1
                left -= 1
            else:
                several.append(sequence)
        if not several or left <= 0:
            return shares
        shares[several[0]] = min(several[0].uncomputed, -(-left // 2))
        left -= shares[several[0]]
        for sequence in sorted(several, key=_uncomputed) if len(several) > 1 else several:
            share = shares.get(sequence, 0)
            if more := min(sequence.uncomputed - share, left):
                shares[sequence] = share + more
                left -= more
        return shares

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        """It computes its tokens anew later; what it drew stays drawn. One whose last token is being drawn
        only waits for that."""
        held = self._held(victim, plan)
        if not victim.decodes:
            self.prompts.remove(victim)
        elif victim.ends_in >= plan.step:
            drawn = plan.step - victim.began
            self._leave_decoding(victim, plan.step - 1)
            victim.known, victim.left = victim.known + drawn, victim.left - drawn
            victim.drawn += drawn
            victim.began = NEVER
        self.running.remove(victim)
        self.kv.give(held)
        if victim.slot != NEVER:
            self.slots.release(victim.slot)
        victim.slot, victim.computed, victim.blocks, victim.runs = NEVER, 0, 0, False
        insort(self.waiting, victim, key=_order)
        plan.preempted.append(victim)

    # Those that wait.

    def _plan_waiting(self, plan: StepPlan, budget: int, now: float, loaded: Container[str]) -> None:
        if not self.waiting:
            return
        starving = self._starving(now, loaded)
        unfinished = [s for s in self.prompts if s.uncomputed > plan.prompts.get(s, 0)]
        promised = sum(map(self._missing, unfinished))
        num_unfinished = len(unfinished)
        for sequence in list(self.waiting):
            if budget == 0 and num_unfinished >= MOST_UNFINISHED:
                break
            if not self._may_have_slot(sequence, starving, loaded, plan):
                continue
            if not self._open(sequence, promised):
                break
            self._enter_slot(sequence, plan)
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_order)
            insort(self.prompts, sequence, key=_order)
            sequence.runs = True
            count = min(sequence.uncomputed, budget)
            if count:
                self._give(plan, sequence, count)
                budget -= count
            promised += self._missing(sequence)
            num_unfinished += count < sequence.uncomputed

    def _missing(self, sequence: Sequence) -> int:
        """Blocks that it will take for all that is known and one more token."""
        return max(0, self.kv.blocks_for(sequence.known + 1) - sequence.blocks)

    def _starving(self, now: float, loaded: Container[str]) -> tuple[float, int] | None:
        for sequence in self.waiting:
            if sequence.digest in loaded and self.slots.find(sequence.digest) is None:
                return sequence.order if now - sequence.arrived_at >= self.aging_s else None
        return None

    def _may_have_slot(
        self,
        sequence: Sequence,
        starving: tuple[float, int] | None,
        loaded: Container[str],
        plan: StepPlan,
    ) -> bool:
        if not sequence.digest:
            return True
        slot = self.slots.find(sequence.digest)
        if slot is None:
            may_page_in = sequence.digest in loaded and len(plan.page_ins) < self.max_page_ins
            return may_page_in and self.slots.num_idle > 0
        return starving is None or sequence.order < starving or sequence.order <= self._waited_until[slot]

    def _open(self, sequence: Sequence, promised: int) -> bool:
        """What the session's last turn left is found, if there is room for the rest."""
        cached = self.kv.cached(sequence.session, min(sequence.shared, sequence.known - 1))
        missing = self.kv.blocks_for(sequence.known + 1) - cached // self.kv.block_size
        room = self.kv.num_free - cached // self.kv.block_size
        if missing > room - promised:
            return False
        sequence.blocks = self.kv.claim(sequence.session, cached)
        sequence.computed = sequence.cached = cached
        return True

    def _enter_slot(self, sequence: Sequence, plan: StepPlan) -> None:
        if not sequence.digest:
            return
        slot = self.slots.find(sequence.digest)
        if slot is None:
            slot, evicted = self.slots.assign(sequence.digest, {each.digest for each in self.waiting})
            plan.page_ins.append((slot, sequence.digest, evicted))
        else:
            plan.slot_hits += 1
        if not self.slots.users(slot):
            self._waited_until[slot] = self.waiting[-1].order
        self.slots.acquire(slot)
        sequence.slot = slot

    # Books.

    def _give(self, plan: StepPlan, sequence: Sequence, count: int) -> None:
        more = self.kv.blocks_for(sequence.computed + count) - sequence.blocks
        if more > 0:
            self.kv.take(more)
            sequence.blocks += more
        plan.prompts[sequence] = count

    def _launch(self, plan: StepPlan) -> None:
        self.step = plan.step
        self.decoding_tokens += self.num_decoding
        plan.kv_tokens = self.decoding_tokens
        for sequence in self._done_decoding():
            self._end_decoding(sequence)
        for sequence, count in plan.prompts.items():
            sequence.computed += count
            sequence.in_step = plan.step
            if sequence.computed == sequence.known:
                plan.drawing.append(sequence)
                self._begin_decoding(sequence, plan.step)

    def _begin_decoding(self, sequence: Sequence, step: int) -> None:
        self.prompts.remove(sequence)
        sequence.began = step
        sequence.ends_in = step + sequence.left - 1
        self._ends.setdefault(sequence.ends_in, {})[sequence] = None
        if sequence.left > 1:
            self.num_decoding += 1
            self.decoding_tokens += sequence.known
            self._grow_at[(step + 1 - sequence.known) % self.kv.block_size] += 1

    def _done_decoding(self) -> list[Sequence]:
        """The last planned step draws their last token: they are in no further one."""
        return [each for each in self._ends.get(self.step, ()) if each.began < self.step]

    def _end_decoding(self, sequence: Sequence) -> None:
        sequence.in_step = self.step
        self.num_decoding -= 1
        self.decoding_tokens -= sequence.length(self.step)
        self._grow_at[(sequence.began + 1 - sequence.known) % self.kv.block_size] -= 1

    def _leave_decoding(self, sequence: Sequence, step: int) -> None:
        """Before its end, after it was part of `step`."""
        of_step = self._ends[sequence.ends_in]
        del of_step[sequence]
        if not of_step:
            del self._ends[sequence.ends_in]
        if sequence.ends_in > step:
            self.num_decoding -= 1
            self.decoding_tokens -= sequence.length(step)
            self._grow_at[(sequence.began + 1 - sequence.known) % self.kv.block_size] -= 1
        sequence.in_step = min(step, sequence.ends_in)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if sequence.decodes:
            self._leave_decoding(sequence, self.step)
            sequence.blocks = self.kv.blocks_for(sequence.length(sequence.in_step))
        else:
            self.prompts.remove(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        tokens = sequence.computed
        if sequence.decodes:
            tokens = sequence.length(min(sequence.in_step, sequence.ends_in))
            sequence.blocks = self.kv.blocks_for(tokens)
        self.kv.leave(sequence.session, tokens, sequence.blocks)
        if sequence.slot != NEVER:
            self.slots.release(sequence.slot)
        sequence.slot, sequence.blocks, sequence.runs = NEVER, 0, False


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order


def _uncomputed(sequence: Sequence) -> int:
    return sequence.uncomputed
