"""Is this server fit to keep what it acknowledges?"""

import logging
from dataclasses import dataclass

from adapter_store.errors import UnsafeStore
from adapter_store.redis_store.url import Node, RedisUrl

_WAITAOF_SINCE = (7, 2)  # Valkey tells a compatible version of Redis, too: 7.2
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerState:
    node: Node
    has_append_only_file: bool


def read_state(node: Node, info: bytes, url: RedisUrl) -> ServerState:
    """From the reply to INFO. Raises UnsafeStore."""
    lines = (line.partition(":") for line in info.decode(errors="replace").splitlines())
    facts = {name: value.strip() for name, _, value in lines}
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise UnsafeStore(
            f"Redis {node} has maxmemory-policy {policy}, so it may throw adapters away: set noeviction"
        )
    if facts.get("aof_enabled") != "1":
        if not url.allow_volatile:
            raise UnsafeStore(
                f"Redis {node} has no append-only file, so it may lose adapters in a crash: set appendonly "
                "yes, or allow it with --allow-volatile (or allow_volatile=1 in the url)"
            )
        _log.warning("Redis %s has no append-only file: it may lose adapters in a crash", node)
        return ServerState(node, has_append_only_file=False)
    version = tuple(int(part) for part in facts["redis_version"].split(".")[:2])
    if version < _WAITAOF_SINCE and not url.allow_volatile:
        raise UnsafeStore(
            f"Redis {node} is {facts['redis_version']}: 7.2 or newer is needed to learn what is on its disk, "
            "or allow it with --allow-volatile (or allow_volatile=1 in the url)"
        )
    return ServerState(node, has_append_only_file=version >= _WAITAOF_SINCE)
