"""Lines of the usage ledger in Redis, one stream a day: beside adapters, with nothing to do with them."""

from collections.abc import Iterator, Sequence
from typing import Self

from adapter_store.redis_store.keys import Keys
from adapter_store.redis_store.primary import Primary
from adapter_store.redis_store.scan import scan
from adapter_store.redis_store.url import RedisUrl

_FIELD = "record"
_PAGE = 2000


class UsageStreams:
    """Thread-safe. Lines may be there twice: what is not known to be stored is stored again. All methods
    raise StoreUnavailable."""

    def __init__(self, primary: Primary, keys: Keys) -> None:
        self._primary, self._keys = primary, keys

    @classmethod
    def open(cls, url: str, *, allow_volatile: bool = False) -> Self:
        """Raises InvalidRef, StoreUnavailable; UnsafeStore for a server that may lose what it takes, unless
        that is allowed."""
        parsed = RedisUrl.parse(url, allow_volatile=allow_volatile)
        return cls(Primary(parsed), Keys(parsed.namespace))

    def append(self, day: str, lines: Sequence[bytes], forget_at: int) -> None:
        """`day` is YYYY-MM-DD, and all of it goes at `forget_at` (unix seconds; 0 is never). The lines are on
        the server's disk when this returns, if it has one."""
        key = self._keys.usage(day)
        commands = [("XADD", key, "*", _FIELD, line) for line in lines]
        forget = [("EXPIREAT", key, forget_at)] if forget_at else []
        self._primary.run(*commands, *forget, durable=True)

    def days(self) -> list[str]:
        prefix = self._keys.usage("")
        return sorted({key.removeprefix(prefix) for key in scan(self._primary, f"{prefix}*")})

    def count(self, day: str) -> int:
        [count] = self._primary.run(("XLEN", self._keys.usage(day)))
        return int(count)

    def read(self, day: str) -> Iterator[bytes]:
        """In the order in which they came."""
        after = b"-"
        while True:
            [page] = self._primary.run(("XRANGE", self._keys.usage(day), after, "+", "COUNT", _PAGE))
            for _, (_, line) in page:
                yield line
            if len(page) < _PAGE:
                return
            after = b"(" + page[-1][0]
