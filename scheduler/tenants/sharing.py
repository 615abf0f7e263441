"""What part of a tenant's rates this scheduler may give, where there are several. Pure.

Each tells the others how much of each tenant's rates it was lately asked for, and all reckon with the same
numbers, its own included as it told them: nine tenths of a rate follow the demand, the rest is even. So the
parts add up to one but for the moments in which one has heard of a change and another has not. Who hears
nothing for a while gives an even part of what it knew of last.
"""

import json
import math
from collections.abc import Iterable

EVEN = 0.1  # Of the rates, whoever asks where: who is asked anew can give at once.
REMEMBERS_S = 5.0  # Demand counts less by the factor e after so long.
SILENCE_S = 3.0
MOST_TOLD = 1000  # Tenants; of others the part is even.
_LEAST = 0.001  # Seconds of a tenant's rates that are worth telling.


class Sharing:
    """Alone until it hears of others."""

    def __init__(self) -> None:
        self._demand: dict[str, tuple[float, float]] = {}  # Seconds of the tenant's rates, and when it was.
        self._told: dict[str, float] = {}
        self._own: dict[str, float] = {}  # As all others have it that have heard.
        self._all: dict[str, float] = {}
        self._count = 1
        self._heard_at = -math.inf

    def share(self, tenant: str, now: float, asked_s: float = 0.0) -> float:
        """The share of the tenant's rates; `asked_s` seconds of them are asked for here."""
        demand, at = self._demand.get(tenant, (0.0, now))
        self._demand[tenant] = (demand * _faded(now - at) + asked_s, now)
        even, wanted = 1 / self._count, self._all.get(tenant, 0.0)
        if self._count == 1 or not wanted or now - self._heard_at > SILENCE_S:
            return even
        return EVEN * even + (1 - EVEN) * self._own.get(tenant, 0.0) / wanted

    def tell(self, now: float) -> str:
        """What others are to hear."""
        faded = {name: demand * _faded(now - at) for name, (demand, at) in self._demand.items()}
        kept = sorted(faded, key=faded.__getitem__, reverse=True)[:MOST_TOLD]
        self._told = {name: round(faded[name], 4) for name in kept if faded[name] >= _LEAST}
        self._demand = {name: (faded[name], now) for name in self._told}
        return json.dumps(self._told)

    def hear(self, texts: Iterable[str], now: float) -> None:
        """What all tell, with what was told here last among it."""
        told = [_parsed(text) for text in texts]
        self._all = {}
        for each in told:
            for tenant, demand in each.items():
                self._all[tenant] = self._all.get(tenant, 0.0) + demand
        self._own = self._told
        self.count(len(told), now)

    def count(self, schedulers: int, now: float) -> None:
        """There are so many; nothing else is known of them."""
        self._count, self._heard_at = max(1, schedulers), now


def _faded(seconds: float) -> float:
    return math.exp(-max(0.0, seconds) / REMEMBERS_S)


def _parsed(text: str) -> dict[str, float]:
    """Nothing of what another version may tell in another form."""
    try:
        return {str(tenant): float(demand) for tenant, demand in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        return {}
