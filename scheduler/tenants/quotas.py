"""The rates of all tenants, as this scheduler keeps them. Pure: whoever asks says what time it is."""

from collections.abc import Callable

from scheduler.tenants.limits import TenantLimits
from scheduler.tenants.rates import Costs, Rates, Refusal

MOST_KEPT = 4096  # Tenants, before those are forgotten whose buckets are full.


class Quotas:
    """`share` says what part of a tenant's rates this scheduler may give (sharing.py), and is told of what is
    asked of it, in seconds of the tenant's rates."""

    def __init__(
        self,
        limits: Callable[[str], TenantLimits],
        share: Callable[[str, float, float], float] = lambda tenant, now, asked_s: 1.0,
    ) -> None:
        self._limits, self._share = limits, share
        self._rates: dict[str, Rates] = {}

    def check(
        self, tenant: str, costs: Costs, now: float, key: str = "", guess: Costs | None = None
    ) -> Refusal | None:
        """Checks as Rates.check does: before a request has cost anything."""
        rates = self._of(tenant, costs, now)
        return rates.check(costs, now, key, guess) if rates else None

    def take(self, tenant: str, costs: Costs, now: float, key: str = "") -> Refusal | None:
        """Takes as Rates.take does."""
        rates = self._of(tenant, costs, now)
        return rates.take(costs, now, key) if rates else None

    def charge(self, tenant: str, costs: Costs, now: float) -> None:
        """Charges for what is not refused: the tenant may be in debt for it."""
        if rates := self._of(tenant, costs, now):
            rates.charge(costs)

    def give_back(self, tenant: str, output_tokens: float) -> None:
        """What was reserved for an answer and not used."""
        if rates := self._rates.get(tenant):
            rates.give_back(output_tokens)

    def _of(self, tenant: str, costs: Costs, now: float) -> Rates | None:
        """None where the tenant has no rates."""
        limits = self._limits(tenant)
        if not limits.has_rates:
            self._rates.pop(tenant, None)
            return None
        rates = self._rates.get(tenant)
        if rates is None:
            if len(self._rates) >= MOST_KEPT:
                self._rates = {name: kept for name, kept in self._rates.items() if not kept.is_idle(now)}
            rates = self._rates[tenant] = Rates()
        rates.adjust(now, limits, self._share(tenant, now, seconds_of(limits, costs)))
        return rates


def seconds_of(limits: TenantLimits, costs: Costs) -> float:
    """How long the tenant's rates take for so much: the longest of them."""
    rates = (limits.requests_per_minute, limits.prompt_tokens_per_minute, limits.output_tokens_per_minute)
    return max((60 * cost / rate for rate, cost in zip(rates, costs, strict=True) if rate), default=0.0)
