"""The names of all keys that a store has in Redis."""

from adapter_store.files.seal import seal as seal
from adapter_store.files.seal import unseal as unseal


class Keys:
    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.pushes = self._meta("push:")  # What the keys of all pushed files begin with.
        self.format = self._meta("format")
        self.leases = self._meta("leases")
        self.leased = self._meta("leased")
        self.tellers = self._meta("tellers")
        self.told = self._meta("told")
        self.secret = self._meta("secret")
        self.changes = self._meta("changes")
        self.first_change = self._meta("first_change")
        self.changed = self._meta("changed")
        self.graves = self._meta("graves")
        self.pending = self._meta("pending")
        self.doomed = self._meta("doomed")

    def record(self, tenant: str, name: str) -> str:
        return self._meta(f"record:{tenant}/{name}")

    def names(self, tenant: str) -> str:
        return self._meta(f"names:{tenant}")

    def lines(self, tenant: str) -> str:
        return self._meta(f"lines:{tenant}")

    def blob(self, digest: str) -> str:
        return self._meta(f"blob:{digest}")

    def push(self, tenant: str, name: str, files: str) -> str:
        """The key of the files of one push of that name."""
        return f"{self.pushes}{tenant}/{name}:{files}"

    def users(self, digest: str) -> str:
        return self._meta(f"users:{digest}")

    def operation(self, identifier: str) -> str:
        return self._meta(f"operation:{identifier}")

    def usage(self, day: str) -> str:
        """The key of the usage records of one day."""
        return self._meta(f"usage:{day}")

    def chunk(self, digest: str, upload: str, number: int) -> str:
        return f"{self.namespace}:{{{digest}:{upload}}}:{number}"

    def _meta(self, rest: str) -> str:
        return f"{self.namespace}:{{meta}}:{rest}"
