"""What schedulers share in a RedisStore: leases (../lease.py), by the server's clock, and a secret."""

import secrets

from adapter_store.formats import FORMAT
from adapter_store.lease import SECRET_BYTES, Lease
from adapter_store.redis_store import scripts
from adapter_store.redis_store.keys import Keys
from adapter_store.redis_store.primary import Primary


class Leases:
    """Any method may raise StoreUnavailable."""

    def __init__(self, primary: Primary, keys: Keys) -> None:
        self._primary, self._keys = primary, keys
        self._told: set[str] = set()  # Holders.

    def now(self) -> float:
        [(seconds, microseconds)] = self._primary.run(("TIME",))
        return int(seconds) + int(microseconds) / 1e6

    def hold(self, lease: Lease) -> None:
        """On disk when it is the first. Of later ones a crash may lose the last: what it said before counts
        then, and only delays others."""
        keys = (self._keys.leases, self._keys.leased, self._keys.format)
        arguments = (lease.holder, str(lease.seconds), lease.to_bytes(), FORMAT)
        command = ("EVAL", scripts.HOLD, len(keys), *keys, *arguments)
        self._primary.run(command, durable=lease.holder not in self._told)
        self._told.add(lease.holder)

    def let_go(self, holder: str) -> None:
        self._primary.run(("ZREM", self._keys.leases, holder), ("HDEL", self._keys.leased, holder))
        self._told.discard(holder)

    def all(self) -> list[Lease]:
        [found] = self._primary.run(("EVAL", scripts.LEASES, 2, self._keys.leases, self._keys.leased))
        pairs = zip(found[::2], found[1::2], strict=True)
        return [Lease.from_bytes(holder.decode(), value) for holder, value in pairs]

    def exchange(self, holder: str, text: str, seconds: float) -> dict[str, str]:
        """Nothing of it is durable: it is told again all the time."""
        arguments = (holder, str(seconds), text)
        command = ("EVAL", scripts.EXCHANGE, 2, self._keys.tellers, self._keys.told, *arguments)
        [found] = self._primary.run(command)
        pairs = zip(found[::2], found[1::2], strict=True)
        return {each.decode(): told.decode(errors="replace") for each, told in pairs}

    def secret(self) -> bytes:
        """On disk before anybody has it."""
        command = ("EVAL", scripts.SECRET, 1, self._keys.secret, secrets.token_bytes(SECRET_BYTES))
        [secret] = self._primary.run(command, durable=True)
        return bytes(secret)
