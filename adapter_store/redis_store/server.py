"""Whether a server is fit to keep what it acknowledges, by its version and settings."""

import logging
import re
from dataclasses import dataclass

from adapter_store.errors import UnsafeStore
from adapter_store.redis_store.url import Node, RedisUrl

_WAITAOF_SINCE = (7, 2)  # Valkey tells a compatible version of Redis, too: 7.2
_ALLOW = "or allow it with --allow-volatile (or allow_volatile=1 in the url)"
_FACT = re.compile(rb"^(redis_version|aof_enabled|maxmemory_policy):(.*)$", re.MULTILINE)  # of 200 lines
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerState:
    """`problem`: why it may lose what it acknowledges, though nobody said that this is fine; else empty."""

    node: Node
    has_append_only_file: bool  # and tells when it is on disk
    problem: str = ""

    def check(self) -> None:
        """Raises UnsafeStore; clients read its text, so it does not name the node."""
        if self.problem:
            raise UnsafeStore(f"the store's Redis {self.problem}")

    def tell(self, before: "ServerState | None" = None) -> None:
        """In the log, what is to be known of it and was not so before."""
        if self == before:
            return
        if self.problem:
            _log.error("Redis %s %s", self.node, self.problem)
        elif not self.has_append_only_file:
            _log.warning("Redis %s may lose adapters in a crash, which is allowed", self.node)
        elif before is not None:
            _log.warning("Redis %s keeps what it acknowledges, again", self.node)


def read_state(node: Node, info: bytes, url: RedisUrl) -> ServerState:
    """From the reply to INFO."""
    facts = _facts(info)
    policy = facts.get("maxmemory_policy", "noeviction")
    has_file = facts.get("aof_enabled") == "1"
    tells = _version(facts) >= _WAITAOF_SINCE
    problem = ""
    if policy != "noeviction":
        problem = f"has maxmemory-policy {policy}, so it may throw adapters away: set noeviction"
    elif not has_file and not url.allow_volatile:
        loses = "has no append-only file, so it may lose adapters in a crash: set appendonly yes"
        problem = f"{loses}, {_ALLOW}"
    elif not tells and not url.allow_volatile:
        hides = "does not tell what is on its disk: that needs Redis 7.2, Valkey 8 or newer"
        problem = f"{hides}, {_ALLOW}"
    return ServerState(node, has_file and tells, problem)


def _facts(info: bytes) -> dict[str, str]:
    return {name.decode(): value.decode(errors="replace").strip() for name, value in _FACT.findall(info)}


def _version(facts: dict[str, str]) -> tuple[int, ...]:
    parts = facts.get("redis_version", "").split(".")[:2]
    return tuple(int(part) for part in parts if part.isdecimal())
