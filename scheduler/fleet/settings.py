"""What can be set of how far executors are filled."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Counts are of one executor. slow_start.py and breaker.py tell what theirs do."""

    reserve_seats: int = 0  # Only for tenants with fewer running there.
    slow_start_s: float = 0.0  # 0 is none.
    circuit_failures: int = 5  # Of the last twice as many attempts; 0 is never.
