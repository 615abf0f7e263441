"""Which versions one page of a listing has. Blocking."""

from adapter_store import AdapterNotFound, Curator, DataLoss, Manifest, NameRecord, Summary
from lorafleet.v1 import adapters_pb2 as pb
from scheduler.adapters.wire import add_details, summary_message
from scheduler.admission.identity import Identity

MAX_PAGE_BYTES = 8 * 1024 * 1024  # Versions of a deep model take tens of kilobytes each.


class Listing:
    """Versions of a tenant, or of one of its names, that `identity` sees; `deleted`: those whose bytes are
    still there, too."""

    def __init__(
        self, store: Curator, identity: Identity, tenant: str, name: str | None, deleted: bool
    ) -> None:
        self._store, self._identity = store, identity
        self._tenant, self._name, self._deleted = tenant, name, deleted

    def page(self, after: str, size: int) -> tuple[list[Summary], str]:
        """The first ones behind `after`, and what the next page comes after: "" at the end.

        That names what the caller sees: what they do not see must not show in it.
        """
        seen = list[Summary]()
        for prefix in self._identity.name_prefixes(self._tenant):  # Of others' names few are read.
            after = max(after, prefix)
            while len(seen) <= size and (found := self._read(after, size + 1)):
                seen += [each for each in found if self._identity.sees(each.tenant, each.name)]
                after = found[-1].key
                if not after.startswith(prefix):
                    break
        return seen[:size], seen[size - 1].key if seen[size:] else ""

    def with_details(self, page: list[Summary]) -> tuple[list[pb.AdapterVersion], str | None]:
        """The messages of as many of the page as a message takes, and what is behind the last of them when
        more are left."""
        versions, num_bytes = list[pb.AdapterVersion](), 0
        records = {each.name: self._record(each.name) for each in page}
        for last, each in zip(["", *(each.key for each in page)], page, strict=False):
            message = summary_message(each)
            manifest, entry = self._manifest(each.digest), records[each.name].versions.get(each.digest)
            if manifest is not None and entry is not None:
                add_details(message, manifest, entry.push)
            num_bytes += message.ByteSize()
            if num_bytes > MAX_PAGE_BYTES and versions:
                return versions, last
            versions.append(message)
        return versions, None

    def _read(self, after: str, limit: int) -> list[Summary]:
        return self._store.summaries(
            self._tenant, name=self._name, after=after, limit=limit, deleted=self._deleted
        )

    def _manifest(self, digest: str) -> Manifest | None:
        """None when the version was removed while it was listed, or cannot be read."""
        try:
            return self._store.manifest(digest)
        except (AdapterNotFound, DataLoss):
            return None

    def _record(self, name: str) -> NameRecord:
        """Empty when it cannot be read."""
        try:
            return self._store.record(self._tenant, name)
        except DataLoss:
            return NameRecord()
