"""What one tenant may take of what is shared, and the file that says so.

[default]                         # of every tenant that is not named below
requests_per_minute = 600

[tenants.acme]                    # overrides [default], key by key
weight = 2.0
max_streams = 200
prompt_tokens_per_minute = 2_000_000
output_tokens_per_minute = 500_000
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from scheduler.watched_file import InvalidFile

# Of what is no 0. Whatever is made of one by sums, products and quotients is a finite number.
_LEAST, _MOST = 1e-6, 1e15


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Checked when made: raises ValueError, whose text begins with the field. 0 is no limit.

    Rates are those of all schedulers together; what is held at once (streams, queued, pushes, watches, calls,
    bytes) is counted by each scheduler for itself.
    """

    weight: float = 1.0  # Of its share beside other tenants.
    max_streams: int = 0  # Requests that were accepted and have not ended.
    max_queued: int = 512  # Of those, the ones that wait.
    requests_per_minute: float = 0.0
    prompt_tokens_per_minute: float = 0.0
    output_tokens_per_minute: float = 0.0
    burst_seconds: float = 60.0  # Of its rates: what it may save up while it asks for less.
    max_transfers: int = 4  # Pushes, pulls and verifications, at once.
    max_spool_bytes: int = 8 << 30  # Of pushes and pulls that are under way.
    max_listings: int = 4  # Calls at once that read all of a tenant: listings, Residency and Collect.
    max_watches: int = 16  # `Fleet.Watch` and `Fleet.Drain` at once.
    max_template_calls: int = 256  # Chats with adapters' templates that run or wait, at once.
    max_heavy_bytes: int = 16 << 20  # Of large messages that are worked on.

    @property
    def has_rates(self) -> bool:
        return any((self.requests_per_minute, self.prompt_tokens_per_minute, self.output_tokens_per_minute))

    def __post_init__(self) -> None:
        for option in fields(self):
            value, whole = getattr(self, option.name), option.type is int
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise ValueError(f"{option.name}: needs {'a whole number' if whole else 'a number'}")
            if value and not _LEAST <= value <= _MOST:
                raise ValueError(f"{option.name}: must be 0, or from {_LEAST:g} to {_MOST:g}")
        for name in ("weight", "burst_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be above 0")


@dataclass(frozen=True, slots=True)
class LimitsTable:
    """Limits by tenant; of those that are not named, `default`."""

    default: TenantLimits
    tenants: Mapping[str, TenantLimits]


def load(file: Path, defaults: TenantLimits) -> LimitsTable:
    """`defaults` are those where the file says nothing. Raises InvalidFile, which names the key."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidFile(f"{file}: {error}") from error
    if unknown := sorted(content.keys() - {"default", "tenants"}):
        raise InvalidFile(f"{file}: {unknown[0]}: unknown key; there are [default] and [tenants.NAME]")
    default = _limits(content.get("default", {}), defaults, f"{file}: default")
    tenants = content.get("tenants", {})
    if not isinstance(tenants, Mapping):
        raise InvalidFile(f"{file}: tenants: needs tables of the form [tenants.NAME]")
    return LimitsTable(
        default, {name: _limits(table, default, f"{file}: tenants.{name}") for name, table in tenants.items()}
    )


def _limits(table: Any, base: TenantLimits, where: str) -> TenantLimits:
    if not isinstance(table, Mapping):
        raise InvalidFile(f"{where}: needs a table of limits")
    if unknown := sorted(table.keys() - {option.name for option in fields(TenantLimits)}):
        raise InvalidFile(f"{where}.{unknown[0]}: unknown key")
    try:
        return replace(base, **table)
    except ValueError as error:
        raise InvalidFile(f"{where}.{error}") from None
