"""The names of all keys that a store has in Redis."""

from dataclasses import dataclass

from adapter_store.files.seal import seal as seal
from adapter_store.files.seal import unseal as unseal


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

    def push(self, tenant: str, name: str, files: str) -> str:
        """Of the files of one push of that name."""
        return f"{self.pushes}{tenant}/{name}:{files}"

    def users(self, digest: str) -> str:
        return self._meta(f"users:{digest}")

    def operation(self, identifier: str) -> str:
        return self._meta(f"operation:{identifier}")

    def usage(self, day: str) -> str:
        """Of the usage records of one day."""
        return self._meta(f"usage:{day}")

    @property
    def pushes(self) -> str:
        """What the keys of all pushed files begin with."""
        return self._meta("push:")

    @property
    def format(self) -> str:
        return self._meta("format")

    @property
    def leases(self) -> str:
        return self._meta("leases")

    @property
    def leased(self) -> str:
        return self._meta("leased")

    @property
    def tellers(self) -> str:
        return self._meta("tellers")

    @property
    def told(self) -> str:
        return self._meta("told")

    @property
    def secret(self) -> str:
        return self._meta("secret")

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

    def chunk(self, digest: str, upload: str, number: int) -> str:
        return f"{self.namespace}:{{{digest}:{upload}}}:{number}"

    def _meta(self, rest: str) -> str:
        return f"{self.namespace}:{{meta}}:{rest}"
