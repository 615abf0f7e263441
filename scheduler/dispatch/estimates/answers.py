"""How long answers are, by who asked and which version answered: learned from those that ended. Pure."""

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

KEPT = 0.98  # An end counts so much of the next one: about the last fifty matter.
ENOUGH = 8.0  # Ends from which on one's own count, and not those of all.
MAX_KNOWN = 4096  # Tenants, and versions; those that ended last stay.

_Key = TypeVar("_Key")


@dataclass(slots=True)
class _Ends:
    """Decayed sums over the answers that ended."""

    ends: float = 0.0
    stops: float = 0.0
    tokens: float = 0.0
    prompts: float = 0.0

    def add(self, prompt: int, tokens: int, stopped: bool) -> None:
        self.ends = self.ends * KEPT + 1
        self.stops = self.stops * KEPT + stopped
        self.tokens = self.tokens * KEPT + tokens
        self.prompts = self.prompts * KEPT + prompt

    def expected(self, most: int) -> float:
        """An answer stops at each token with the same chance, those that went to their limit included: so a
        mean over short and long limits is none of either. Tokens, of at most `most`."""
        if not self.stops or not self.tokens:
            return most
        chance = self.stops / self.tokens
        return -math.expm1(-chance * most) / chance


@dataclass(slots=True)
class Answers:
    """Told of each answer that ended well."""

    _all: _Ends = field(default_factory=_Ends)
    _tenants: OrderedDict[str, _Ends] = field(default_factory=OrderedDict)
    _versions: OrderedDict[tuple[str, str], _Ends] = field(default_factory=OrderedDict)

    @property
    def known(self) -> bool:
        """Whether so many have ended that there is something to expect."""
        return self._all.ends >= ENOUGH

    def ended(self, tenant: str, digest: str, prompt: int, tokens: int, *, stopped: bool) -> None:
        """`stopped`: before it had as many tokens as it might."""
        of_tenant, of_version = _of(self._tenants, tenant), _of(self._versions, (tenant, digest))
        for ends in (self._all, of_tenant, of_version):
            ends.add(prompt, tokens, stopped)

    def expected(self, tenant: str, digest: str, most: int) -> float:
        """Tokens of an answer that may have `most`."""
        for ends in (self._versions.get((tenant, digest)), self._tenants.get(tenant)):
            if ends and ends.ends >= ENOUGH:
                return ends.expected(most)
        return self._all.expected(most)

    def mean(self, tenant: str | None = None) -> tuple[float, float]:
        """Tokens of answer and prompt that a request of the tenant has had; of anyone's for None, and of one
        that is not known. (0, 0): nothing is known."""
        ends = None if tenant is None else self._tenants.get(tenant)
        if ends is None or ends.ends < ENOUGH:
            ends = self._all
        return (ends.tokens / ends.ends, ends.prompts / ends.ends) if ends.ends else (0.0, 0.0)


def _of(known: OrderedDict[_Key, _Ends], key: _Key) -> _Ends:
    ends = known.setdefault(key, _Ends())
    known.move_to_end(key)
    if len(known) > MAX_KNOWN:
        known.popitem(last=False)
    return ends
