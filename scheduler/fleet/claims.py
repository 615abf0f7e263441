"""What was sent to one executor and is not over, by dispatch and by version. Pure."""

from dataclasses import dataclass

from scheduler.fleet.residency import Tier


@dataclass(slots=True)
class Version:
    """Dispatches of one version, while one of them has not ended or is not covered by the last report."""

    tier: Tier  # The closest that holds it, as `Residency.tier` tells.
    claims: int = 0  # Have not ended.
    unreported: int = 0  # The last report does not cover them; they may have ended.
    known: int = 0  # Have not ended, and the last report covers them: so it counts their slot as taken.
    used_at: float = 0.0  # When the last one was sent or ended.

    def is_promised(self) -> bool:
        """Whether it takes a slot that the report does not know as taken."""
        return self.unreported > 0 and not self.known


@dataclass(slots=True, eq=False)
class Sent:
    """One dispatch that has not ended, or that the last report does not cover."""

    digest: str
    tenant: str
    version: Version
    has_ended: bool = False
    is_reported: bool = False
