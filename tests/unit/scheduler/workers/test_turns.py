"""Turns at the workers: by tenant, and later for those whose jobs had to be stopped."""

import asyncio

import pytest

from scheduler.workers import turns
from scheduler.workers.turns import WorkerTurns


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Callers:
    """Each caller that has a turn is in `having`, in order."""

    def __init__(self, turns: WorkerTurns) -> None:
        self.turns = turns
        self.having: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, *tenants: str) -> None:
        self.tasks += [asyncio.create_task(self._take(tenant)) for tenant in tenants]
        await settle()

    async def end(self, tenant: str, *, stopped_after_s: float = 0.0) -> None:
        self.having.remove(tenant)
        self.turns.give_back(tenant, stopped_after_s=stopped_after_s)
        await settle()

    async def _take(self, tenant: str) -> None:
        await self.turns.take(tenant)
        self.having.append(tenant)


async def test_one_tenant_has_half_of_the_workers_and_others_come_in_turn() -> None:
    callers = Callers(WorkerTurns(2))
    await callers.come("a", "a", "a", "b", "b", "c")
    assert callers.having == ["a", "b"]
    order = []
    for _ in range(4):
        await callers.end(callers.having[0])
        order.append(callers.having[-1])
    assert order == ["a", "b", "c", "a"]


async def test_who_had_one_stopped_rests_and_leaves_a_worker_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "REST", 1.0)
    callers = Callers(WorkerTurns(2))
    await callers.come("bomber", "worse", "bomber", "worse")
    await callers.end("bomber", stopped_after_s=1000.0)
    await callers.end("worse", stopped_after_s=0.001)
    await asyncio.sleep(0.02)
    assert callers.having == ["worse"]  # The other rests.
    await callers.come("honest")
    assert callers.having == ["worse", "honest"]
    await callers.come("worst")
    await callers.end("honest")
    assert callers.having == ["worse", "worst"]
    await callers.end("worst", stopped_after_s=0.001)
    await callers.come("worst")
    await asyncio.sleep(0.02)
    assert callers.having == ["worse"]  # Together they leave one to others.


async def test_who_is_cancelled_in_the_line_leaves_nothing_behind() -> None:
    callers = Callers(WorkerTurns(1))
    await callers.come("a", "b", "c")
    callers.tasks[1].cancel()
    await settle()
    await callers.end("a")
    assert callers.having == ["c"]
    await callers.come("d")
    callers.tasks[3].cancel()
    await callers.end("c")
    await callers.come("e")
    assert callers.having == ["e"]
