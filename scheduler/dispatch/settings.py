"""What can be set of the dispatcher and of what it owns."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.config import Config
from scheduler.fleet.settings import FleetSettings


@dataclass(frozen=True, slots=True)
class DispatcherSettings:
    """Times in seconds."""

    max_queued: int = 1024
    max_queued_per_tenant: int = 512
    aging_s: float = 2.0
    priority_aging_s: float = 5.0
    prompt_token_price: float = 0.5  # A generated token costs 1.
    fleet: FleetSettings = field(default_factory=FleetSettings)
    weights: Mapping[str, float] = field(default_factory=dict)  # Of tenants; 1 where none is given.
    queue_timeout_s: float = 30.0
    max_queue_s: float = math.inf  # Of requests without a deadline: those that would wait longer are refused.
    max_attempts: int = 3
    retry_pause_s: float = 0.5  # After an attempt that an executor gave up; doubles with each in a row.
    sweep_interval_s: float = 0.25
    plan_pause_s: float = 0.002  # After a batch, until the next; a step takes several times as long.

    @classmethod
    def of(cls, config: Config) -> "DispatcherSettings":
        return cls(
            max_queued=config.max_queued,
            max_queued_per_tenant=config.max_queued_per_tenant,
            aging_s=config.aging,
            priority_aging_s=config.priority_aging,
            prompt_token_price=config.prompt_token_price,
            fleet=FleetSettings(
                reserve_seats=config.reserve_seats if config.tells_callers_apart else 0,
                slow_start_s=config.slow_start,
                circuit_failures=config.circuit_failures,
            ),
            queue_timeout_s=config.queue_timeout,
            max_queue_s=config.max_queue_time or math.inf,
            max_attempts=config.max_attempts,
        )
