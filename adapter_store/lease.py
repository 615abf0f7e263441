"""What each scheduler says of itself in the store, so that others know what it still needs.

A lease says: "I act on all changes up to number `seen`, and of the versions that had left ACTIVE by then I
still have accepted requests of these." A scheduler accepts nothing new of a version once it has seen its
withdrawal. So what a lease that has seen it does not name, no later lease of that holder names, and one that
is out of date only makes others wait. But for a stream that broke off, with its scheduler or its connection,
and that its client takes up again here: it counts from then on, so that it may come back after a drain has
answered, and when the bytes have gone meanwhile it ends with NOT_FOUND.

Bytes go, and a drain ends, when every lease has seen all changes and none names the version. A scheduler that
was killed renews nothing, and counts no more after `seconds`. One that is cut off from the store counts no
more then, either: it may still have requests that wait for an executor, and such a request fails with
NOT_FOUND if the bytes are gone by then. So these seconds are more than a request waits for an executor to
come back, and fewer than the grace of deletions.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from adapter_store.errors import DataLoss
from adapter_store.files.seal import seal, unseal

LEASE_S = 40.0
SECRET_BYTES = 32  # Of what those who hold leases have in common (AdapterStore.secret).


@dataclass(frozen=True, slots=True)
class Lease:
    holder: str  # any name that no other has; made of letters and digits
    seen: int  # a number of News
    used: frozenset[tuple[str, str]] = field(default_factory=frozenset)  # ("tenant/name", digest)
    seconds: float = LEASE_S  # after which it counts no more, by the store's clock

    def to_bytes(self) -> bytes:
        text = json.dumps({"seen": self.seen, "used": sorted(self.used), "seconds": self.seconds})
        return seal(f"lease {self.holder}", text)

    @classmethod
    def from_bytes(cls, holder: str, value: bytes) -> "Lease":
        """A damaged one has seen nothing: others wait until it is renewed, or counts no more."""
        try:
            fields = json.loads(unseal(f"lease {holder}", value))
        except DataLoss:
            return cls(holder, -1)
        used = frozenset((adapter, digest) for adapter, digest in fields["used"])
        return cls(holder, fields["seen"], used, fields["seconds"])


def used_by(leases: Iterable[Lease]) -> frozenset[tuple[str, str]]:
    """What anybody still uses."""
    return frozenset(name for lease in leases for name in lease.used)
