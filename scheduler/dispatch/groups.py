"""How waiting requests are grouped: by version and needs, by tenant within that. Pure."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from scheduler.dispatch.shares import Shares
from scheduler.fleet.needs import Needs

Turn: TypeAlias = tuple[float, int, float, int, str]
"""(tenant's virtual tokens, -level, its version's virtual tokens, number, tenant): the smallest first."""


@dataclass(slots=True, eq=False)
class Tenant:
    """One with waiting requests."""

    name: str
    weight: float
    cap: int  # What priorities age up to.
    at: float  # Its virtual tokens in turns, which stand still while nobody else waits.
    size: int = 0
    priorities: Counter[int] = field(default_factory=Counter)
    groups: dict["Group", None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Group:
    """One tenant's requests in one lane."""

    tenant: Tenant
    lane: "Lane"
    versions: Shares  # Of the tenant's versions.
    numbers: dict[int, list[int]] = field(default_factory=dict)  # By priority, each sorted, none empty.
    turn: Turn | None = None  # Its entry in the lane's heap that counts; others are left-overs.


@dataclass(slots=True, eq=False)
class Lane:
    """The waiting requests of one version with equal needs: where one can run, all can. Not empty."""

    digest: str
    needs: Needs
    serial: int  # Breaks ties apart.
    size: int = 0
    groups: dict[str, Group] = field(default_factory=dict)  # By tenant.
    turns: list[Turn] = field(default_factory=list)  # A heap.
