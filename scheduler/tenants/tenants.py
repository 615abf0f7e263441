"""The limits of all tenants, which may change while requests run."""

import math
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

from scheduler.tenants.limits import LimitsTable, TenantLimits, load
from scheduler.watched_file import WatchedFile

LOOK_S = 0.25


class Tenants:
    """Limits by tenant: what the file says, and where it says nothing, or there is none, the defaults."""

    def __init__(self, defaults: TenantLimits | None = None, file: Path | None = None) -> None:
        """Raises InvalidFile."""
        defaults = defaults or TenantLimits()
        self._file = WatchedFile(file, lambda path: load(path, defaults)) if file else None
        self._table = self._file.read() if self._file else LimitsTable(defaults, {})

    def limits(self, tenant: str) -> TenantLimits:
        """A look-up in memory, for any path however hot."""
        table = self._table
        return table.tenants.get(tenant, table.default)

    def each(self, limit: str) -> Callable[[str], int]:
        """One of the whole limits, by tenant: 0 is none. Raises AttributeError for what is no limit."""
        of = attrgetter(limit)
        of(self._table.default)
        return lambda tenant: int(of(self.limits(tenant)))

    def weight(self, tenant: str) -> float:
        return self.limits(tenant).weight

    def max_queued(self, tenant: str) -> float:
        """Infinity without a limit."""
        return self.limits(tenant).max_queued or math.inf

    def look(self) -> None:
        """Reads the file again if it has changed: to be asked every `LOOK_S` seconds. A file that cannot be
        used changes nothing, and is logged once."""
        if self._file is not None:
            self._table = self._file.read()
