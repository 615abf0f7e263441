"""Whether a server is fit to keep what it acknowledges, by its version and settings."""

import logging
from dataclasses import dataclass

from adapter_store.errors import UnsafeStore
from adapter_store.redis_store.url import Node, RedisUrl

_WAITAOF_SINCE = (7, 2)  # Valkey tells a compatible version of Redis, too: 7.2
_ALLOW = "or allow it with --allow-volatile (or allow_volatile=1 in the url)"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerState:
    node: Node
    has_append_only_file: bool  # and tells when it is on disk


def read_state(node: Node, info: bytes, url: RedisUrl) -> ServerState:
    """From the reply to INFO. Raises UnsafeStore; clients read its text, so it does not name the node."""
    facts = _facts(info)
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise _unsafe(node, f"has maxmemory-policy {policy}, so it may throw adapters away: set noeviction")
    has_file = facts.get("aof_enabled") == "1"
    tells = _version(facts) >= _WAITAOF_SINCE
    if not has_file and not url.allow_volatile:
        problem = "has no append-only file, so it may lose adapters in a crash: set appendonly yes"
        raise _unsafe(node, f"{problem}, {_ALLOW}")
    if not tells and not url.allow_volatile:
        problem = "does not tell what is on its disk: that needs Redis 7.2, Valkey 8 or newer"
        raise _unsafe(node, f"{problem}, {_ALLOW}")
    if not (has_file and tells):
        _log.warning("Redis %s may lose adapters in a crash, which is allowed", node)
    return ServerState(node, has_append_only_file=has_file and tells)


def _unsafe(node: Node, problem: str) -> UnsafeStore:
    _log.error("Redis %s %s", node, problem)
    return UnsafeStore(f"the store's Redis {problem}")


def _facts(info: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in info.decode(errors="replace").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _version(facts: dict[str, str]) -> tuple[int, ...]:
    parts = facts.get("redis_version", "").split(".")[:2]
    return tuple(int(part) for part in parts if part.isdecimal())
