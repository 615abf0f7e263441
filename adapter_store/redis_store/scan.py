"""Finds keys by a pattern, for operators' tools: it walks all keys that there are."""

from collections.abc import Iterator

from adapter_store.redis_store.primary import Primary

_PAGE = 1000


def scan(primary: Primary, pattern: str) -> Iterator[str]:
    """In no order, some twice. `pattern` is a glob."""
    cursor = b"0"
    while True:
        [(cursor, found)] = primary.run(("SCAN", cursor, "MATCH", pattern, "COUNT", _PAGE))
        yield from (key.decode() for key in found)
        if cursor == b"0":
            return
