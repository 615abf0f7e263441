"""A store in a folder that a test can take away, silence or damage."""

import threading

from adapter_store import DataLoss, DiskStore, NameRecord, News, Ref, StoreUnavailable, Version

LATEST = Ref.parse("acme/x", "")


class LeavingStore(DiskStore):
    away = damaged = False
    silent: threading.Event | None = None
    reads = 0

    def record(self, tenant: str, name: str) -> NameRecord:
        self.reads += 1
        self._must_answer()
        if self.damaged:
            raise DataLoss("the record is damaged")
        return super().record(tenant, name)

    def news(self, since: int) -> News:
        self._must_answer()
        return super().news(since)

    def _must_answer(self) -> None:
        if self.silent is not None:
            self.silent.wait(60)
        if self.away:
            raise StoreUnavailable("the disk is away")


def at(version: Version) -> Ref:
    """The version of acme/x by its digest."""
    return Ref("acme", "x", digest=version.digest)
