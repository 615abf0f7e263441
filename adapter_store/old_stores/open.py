"""Opens a store to be read by a migration, whichever of the formats it has that one can read."""

from pathlib import Path
from typing import Protocol

from adapter_store.errors import OtherFormat
from adapter_store.formats import FORMAT, MIGRATED
from adapter_store.old_stores.disk import OldDiskStore
from adapter_store.pushed import PushedFiles
from adapter_store.record import NameRecord
from adapter_store.ref import Ref
from adapter_store.store import folder_of, open_store
from adapter_store.summary import Summary


class MigrationSource(Protocol):
    """The part of an AdapterStore (../store.py) that is read. `pushed`: None where no push replaces any."""

    def tenants(self) -> list[str]: ...

    def damaged(self, tenant: str) -> list[str]: ...

    def record(self, tenant: str, name: str) -> NameRecord: ...

    def summaries(self, tenant: str, *, after: str = "", limit: int = 100) -> list[Summary]: ...

    def pushed(self, ref: Ref) -> PushedFiles | None: ...

    def export(self, ref: Ref, target: Path) -> None: ...


def open_source(url: str, *, allow_volatile: bool = False) -> tuple[MigrationSource, int]:
    """The store behind a url as of `open_store`, and its format. Raises what that raises."""
    try:
        return open_store(url, create=False, allow_volatile=allow_volatile), FORMAT
    except OtherFormat as error:
        if error.found not in MIGRATED:
            raise
        if (folder := folder_of(url)) is not None:
            return OldDiskStore(folder, error.found), error.found
        from adapter_store.old_stores.redis import OldRedisStore
        from adapter_store.redis_store.url import RedisUrl

        return OldRedisStore(RedisUrl.parse(url, allow_volatile=allow_volatile), error.found), error.found
