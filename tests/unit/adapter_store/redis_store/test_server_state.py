"""INFO of servers that we have not got."""

import pytest

from adapter_store import UnsafeStore
from adapter_store.redis_store.server import read_state
from adapter_store.redis_store.url import Node, RedisUrl

NODE = Node("redis.internal", 6379)


def info(version: str, aof: int = 1, policy: str = "noeviction") -> bytes:
    lines = ("# Server", f"redis_version:{version}", f"aof_enabled:{aof}", f"maxmemory_policy:{policy}")
    return "\r\n".join(lines).encode()


def url(allow_volatile: bool) -> RedisUrl:
    return RedisUrl((NODE,), allow_volatile=allow_volatile)


@pytest.mark.parametrize("version", ["7.2.4", "7.4.0", "8.0.3", "10.1.0"])
@pytest.mark.parametrize("allow_volatile", [True, False])
def test_newer_servers_with_a_file(version: str, allow_volatile: bool) -> None:
    assert read_state(NODE, info(version), url(allow_volatile)).has_append_only_file


@pytest.mark.parametrize("reply", [info("7.0.15"), info("6.2.0"), info("7.2.4", aof=0), b"", b"\xff"])
def test_servers_that_may_lose_something(reply: bytes) -> None:
    with pytest.raises(UnsafeStore, match="--allow-volatile") as error:
        read_state(NODE, reply, url(False)).check()
    assert "redis.internal" not in str(error.value)
    allowed = read_state(NODE, reply, url(True))
    allowed.check()
    assert not allowed.has_append_only_file


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random", "volatile-lru", "volatile-ttl"])
def test_eviction_is_never_allowed(policy: str) -> None:
    with pytest.raises(UnsafeStore, match=policy):
        read_state(NODE, info("8.0.0", policy=policy), url(True)).check()
