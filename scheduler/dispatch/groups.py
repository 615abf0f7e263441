"""How waiting requests are grouped: by version and needs, by tenant within that. Pure."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from scheduler.dispatch.shares import Share, Shares
from scheduler.fleet.needs import Needs

Turn: TypeAlias = tuple[float, int, float, int, str]
"""(tenant's virtual tokens, -level, its version's virtual tokens, number, tenant): the smallest first."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request as queue and policy know it. It keeps its `number`, and so its place, when it comes back."""

    number: int  # Unique, in order of arrival.
    tenant: str
    digest: str  # BASE for the base model.
    priority: int
    cost: int  # Prompt tokens, what the tenant is charged on leaving.
    max_rank: int  # What a slot must be able to hold; 0 for the base model.
    modules: frozenset[str]
    avoid: frozenset[str] = frozenset()  # Names of executors where an attempt failed: the last choice.
    full_heads: int = 0  # Places for such that an executor must have.
    max_length: int = 0  # Tokens of prompt and answer that an executor must take.
    refused: frozenset[str] = frozenset()  # Names of executors that can never serve it.
    masked: bool = False  # Whether an executor must know of constraints.
    session: str = ""  # Equal for turns whose prefixes an executor may share; "" for none.
    arrived: float = 0.0  # When it was accepted, in seconds on the clock of `Queue.age`.

    @property
    def most(self) -> int:
        """Tokens that its answer may have."""
        return max(0, self.max_length - self.cost)


@dataclass(slots=True, eq=False)
class Tenant:
    """One with waiting requests."""

    name: str
    weight_of: Callable[[str], float]  # It may change.
    share: Share
    cap: int  # What priorities age up to.
    at: float  # The tokens of its share in turns, which stand still while nobody else waits.
    size: int = 0
    most: int = 0  # Tokens that the answers to all its requests may have together.
    priorities: Counter[int] = field(default_factory=Counter)
    groups: dict["Group", None] = field(default_factory=dict)

    @property
    def weight(self) -> float:
        return self.weight_of(self.name)

    def enters(self, request: Waiting) -> None:
        self.size += 1
        self.most += request.most
        self.priorities[request.priority] += 1

    def leaves(self, request: Waiting) -> None:
        self.size -= 1
        self.most -= request.most
        self.priorities[request.priority] -= 1
        if not self.priorities[request.priority]:
            del self.priorities[request.priority]

    def can_progress(self, is_blocked: Callable[["Lane"], bool]) -> bool:
        """Whether one of its lanes is not blocked. The one that is found is looked at first the next time."""
        for group in reversed(self.groups):
            if not is_blocked(group.lane):
                del self.groups[group]
                self.groups[group] = None
                return True
        return False


@dataclass(slots=True, eq=False)
class Group:
    """One tenant's requests in one lane."""

    tenant: Tenant
    lane: "Lane"
    versions: Shares  # Of the tenant's versions.
    share: Share  # That of this version.
    numbers: dict[int, list[int]] = field(default_factory=dict)  # By priority, each sorted, none empty.
    turn: Turn | None = None  # Its entry in the lane's heap that counts; others are left-overs.
    is_ahead: bool = False  # The request of that entry is gone: the next one has a later turn.


@dataclass(slots=True, eq=False)
class Lane:
    """The waiting requests of one version with equal needs: where one can run, all can. Not empty."""

    digest: str
    needs: Needs
    serial: int  # Breaks ties apart.
    size: int = 0
    cold_since: float | None = None  # Since when it waits for a slot, if it does (cold.py).
    owed_since: float = math.inf  # A wait that began earlier, and is to count when it is found cold.
    groups: dict[str, Group] = field(default_factory=dict)  # By tenant.
    turns: list[Turn] = field(default_factory=list)  # A heap.

    @property
    def waits_since(self) -> float:
        """Since when it waits for a slot, if it does, or a wait is owed to it; else infinity."""
        return self.owed_since if self.cold_since is None else min(self.owed_since, self.cold_since)

    def owe(self, since: float) -> None:
        """A wait that began then goes on here."""
        self.owed_since = min(self.owed_since, since)
