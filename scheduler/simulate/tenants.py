"""Tenants with quotas before a simulated fleet, and callers who come again when they are refused."""

from collections.abc import Mapping
from dataclasses import replace
from random import Random

from scheduler.dispatch.groups import Waiting
from scheduler.simulate.requests import Asked, Record
from scheduler.simulate.scheduler import Scheduler
from scheduler.tenants.limits import TenantLimits
from scheduler.tenants.quotas import Quotas
from scheduler.tenants.rates import Costs

NO_LIMITS = TenantLimits()


class ByQuota:
    """The scheduler's own rates by tenant, before a fleet with one scheduler: to be passed to `play` as
    gate."""

    def __init__(self, limits: Mapping[str, TenantLimits]) -> None:
        self._quotas = Quotas(lambda tenant: limits.get(tenant, NO_LIMITS))

    def __call__(self, scheduler: Scheduler, waiting: Waiting, record: Record) -> float | None:
        asked = record.asked
        costs = Costs(1, asked.prompt, asked.output)
        refusal = self._quotas.take(asked.tenant, costs, scheduler.clock.now, asked.request_id)
        if refusal is None:
            return None
        record.retry_after_s = refusal.wait_s
        return refusal.wait_s


class Retrying:
    """Callers who come again until `until_s`: after what they were told and some chance, as clients add it,
    or after `pause_s` whatever they were told, and no more than `tries` times."""

    def __init__(self, until_s: float, seed: int, pause_s: float | None = None, tries: int = 1000) -> None:
        self._until_s, self._pause_s, self._tries = until_s, pause_s, tries
        self._rng = Random(f"{seed} retries")

    def again(self, record: Record, now: float) -> Asked | None:
        told, asked = record.retry_after_s, record.asked
        if told is None or asked.tries >= self._tries:
            return None
        wait_s = told + 0.1 * self._rng.random() if self._pause_s is None else self._pause_s
        again = replace(asked, at=now + wait_s, tries=asked.tries + 1)
        return again if again.at < self._until_s else None
