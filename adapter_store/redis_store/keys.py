"""Names of keys, and seals: a value that is not the one written under its key is never taken for it."""

import hashlib
from dataclasses import dataclass

from adapter_store.errors import DataLoss


@dataclass(frozen=True, slots=True)
class Keys:
    namespace: str

    def record(self, tenant: str, name: str) -> str:
        return self._meta(f"record:{tenant}/{name}")

    def names(self, tenant: str) -> str:
        return self._meta(f"names:{tenant}")

    def lines(self, tenant: str) -> str:
        return self._meta(f"lines:{tenant}")

    def blob(self, digest: str) -> str:
        return self._meta(f"blob:{digest}")

    def users(self, digest: str) -> str:
        return self._meta(f"users:{digest}")

    def operation(self, identifier: str) -> str:
        return self._meta(f"operation:{identifier}")

    @property
    def changes(self) -> str:
        return self._meta("changes")

    @property
    def first_change(self) -> str:
        return self._meta("first_change")

    @property
    def changed(self) -> str:
        return self._meta("changed")

    @property
    def graves(self) -> str:
        return self._meta("graves")

    @property
    def pending(self) -> str:
        return self._meta("pending")

    @property
    def doomed(self) -> str:
        return self._meta("doomed")

    @property
    def channel(self) -> str:
        return f"{self.namespace}:changes"

    def chunk(self, digest: str, upload: str, number: int) -> str:
        return f"{self.namespace}:{{{digest}:{upload}}}:{number}"

    def _meta(self, rest: str) -> str:
        return f"{self.namespace}:{{meta}}:{rest}"


def seal(key: str, body: str) -> bytes:
    """`body` behind a hash of itself and its key."""
    data = body.encode()
    return _hash(key, data) + b"\n" + data


def unseal(key: str, value: bytes) -> str:
    """Raises DataLoss when `value` is damaged, or was written under another key."""
    found, _, data = value.partition(b"\n")
    if found != _hash(key, data):
        raise DataLoss(f"what the store holds as {key} is not what was written there")
    return data.decode()


def _hash(key: str, data: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\n" + data).hexdigest().encode()
