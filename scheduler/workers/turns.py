"""Whose turn it is at the workers: no tenant's jobs hold up those of another."""

import asyncio
from collections import Counter, deque

REST = 3.0
"""Who had a worker stopped waits for so many times as long as that took: a core is theirs for a quarter."""
REMEMBERED_S = 60.0  # That a tenant's job had to be stopped.


class WorkerTurns:
    """Tenants have workers by turns, and one of them half of the workers at most. Those whose jobs had
    to be stopped lately leave, all together, one worker to others. Used from one event loop."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._share = max(1, workers // 2)
        # By tenant; no one of them is 0.
        self._taken = Counter[str]()
        self._resting = Counter[str]()
        self._stopped = Counter[str]()  # Lately.
        self._line: dict[str, deque[asyncio.Future[None]]] = {}  # By tenant, none empty: the next one first.

    async def take(self, tenant: str) -> None:
        """Waits for a turn, which is to be given back."""
        turn = asyncio.get_running_loop().create_future()
        self._line.setdefault(tenant, deque()).append(turn)
        self._go_on()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.give_back(tenant)  # It came at that very moment.
            else:
                self._leave(tenant, turn)
            raise

    def give_back(self, tenant: str, *, stopped_after_s: float = 0.0) -> None:
        """`stopped_after_s`: the worker had to be stopped, after so long."""
        self._taken -= Counter({tenant: 1})
        if stopped_after_s:
            self._count(self._resting, tenant, REST * stopped_after_s)
            self._count(self._stopped, tenant, REMEMBERED_S)
        self._go_on()

    def _count(self, counter: Counter[str], tenant: str, seconds: float) -> None:
        counter[tenant] += 1
        asyncio.get_running_loop().call_later(seconds, self._count_no_more, counter, tenant)

    def _count_no_more(self, counter: Counter[str], tenant: str) -> None:
        counter -= Counter({tenant: 1})
        self._go_on()

    def _go_on(self) -> None:
        while (tenant := next(filter(self._may_begin, self._line), None)) is not None:
            line = self._line.pop(tenant)
            turn = line.popleft()
            if line:
                self._line[tenant] = line  # Behind all others now.
            if not turn.cancelled():
                self._taken[tenant] += 1
                turn.set_result(None)

    def _may_begin(self, tenant: str) -> bool:
        if self._taken.total() >= self._workers or self._taken[tenant] >= self._share:
            return False
        if not self._stopped[tenant]:
            return True
        costly = sum(self._taken[each] for each in self._stopped)
        return not self._resting[tenant] and costly < max(1, self._workers - 1)

    def _leave(self, tenant: str, turn: asyncio.Future[None]) -> None:
        line = self._line.get(tenant)
        if line is not None and turn in line:
            line.remove(turn)
            if not line:
                del self._line[tenant]
