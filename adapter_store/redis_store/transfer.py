"""Sends and reads chunks, many under way at a time: the primary never waits for us, nor we for it."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

import redis
from redis.exceptions import RedisError

from adapter_store.redis_store.channel import Channel
from adapter_store.redis_store.primary import NotNow, Primary

_UNDER_WAY = 4  # chunks asked for, or sent and not yet acknowledged: what may be held in memory
_LANES = 2  # connections that chunks are read on: one thread cannot do as much as the server can
_JOINED_BYTES = 8 << 10


class ChunkWriter:
    """Sets chunks that expire. One that may not have arrived is sent again, which does no harm."""

    def __init__(self, primary: Primary, seconds: int) -> None:
        # NX: a repetition that arrives late must not make a chunk expire that is permanent by then.
        self._options = b"\r\n$2\r\nEX\r\n$%d\r\n%d\r\n$2\r\nNX\r\n" % (len(str(seconds)), seconds)
        self._primary = primary
        self._chunks: deque[tuple[bytes | memoryview, ...]] = deque()  # commands without a reply so far
        self._channel: Channel | None = None
        self._sent = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def write(self, key: str, pieces: Sequence[memoryview]) -> None:
        """`pieces` must not change before `finish`. Raises StoreUnavailable."""
        name, size = key.encode(), sum(map(len, pieces))
        start = b"*6\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, size)
        self._chunks.append(_joined(start, *pieces, self._options))
        self._advance(_UNDER_WAY)

    def finish(self) -> None:
        """Every chunk is there. Raises StoreUnavailable."""
        self._advance(0)

    def _advance(self, limit: int) -> None:
        self._primary.use(lambda pool: self._attempt(pool, limit))

    def _attempt(self, pool: redis.ConnectionPool, limit: int) -> None:
        """Sends everything, until at most `limit` chunks are without a reply."""
        try:
            if self._channel is None:
                self._channel, self._sent = Channel(pool), 0
            while self._sent < len(self._chunks):
                self._channel.send(*self._chunks[self._sent])
                self._sent += 1
            while len(self._chunks) > limit:
                self._channel.status()
                self._chunks.popleft()
                self._sent -= 1
        except BaseException:  # whatever it is, replies may be under way
            self._close()
            raise

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def read_chunks(
    primary: Primary, keys: Sequence[str], targets: Sequence[memoryview], arrived: Callable[[int], None]
) -> None:
    """Each chunk into its target. `arrived` is told the number of each once it is there: in any order, and by
    several threads, each of which may work on what it has while it is still in a core's cache.

    Raises StoreUnavailable; LookupError when there is none of that length; what `arrived` raises.
    """
    stopped = threading.Event()

    def read(numbers: Sequence[int]) -> None:
        _read_in_order(primary, keys, targets, numbers, arrived, stopped)

    if len(keys) < _UNDER_WAY:
        read(range(len(keys)))
        return
    with ThreadPoolExecutor(_LANES, "chunks") as pool:
        lanes = [pool.submit(read, range(first, len(keys), _LANES)) for first in range(_LANES)]
        try:
            wait(lanes, return_when=FIRST_EXCEPTION)
        finally:
            stopped.set()  # of those that go on without the one that failed
    for lane in lanes:
        lane.result()


def _read_in_order(
    primary: Primary,
    keys: Sequence[str],
    targets: Sequence[memoryview],
    numbers: Sequence[int],
    arrived: Callable[[int], None],
    stopped: threading.Event,
) -> None:
    """The chunks of these `numbers`, on one connection."""
    done = 0

    def attempt(pool: redis.ConnectionPool) -> None:
        nonlocal done
        before = sent = done
        try:
            with Channel(pool) as channel:
                while done < len(numbers) and not stopped.is_set():
                    while sent < min(len(numbers), done + _UNDER_WAY // _LANES):
                        name = keys[numbers[sent]].encode()
                        channel.send(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
                        sent += 1
                    number = numbers[done]
                    if not channel.bulk_into(targets[number]):
                        raise LookupError(keys[number])
                    done += 1
                    arrived(number)
        except (NotNow, RedisError, OSError):
            if done == before:
                raise  # otherwise it goes on from here

    while done < len(numbers) and not stopped.is_set():
        primary.use(attempt)


def _joined(*parts: bytes | memoryview) -> tuple[bytes | memoryview, ...]:
    """Small neighbours as one: each part costs a moment of its own."""
    joined: list[bytes | memoryview] = []
    for part in parts:
        if joined and len(joined[-1]) + len(part) <= _JOINED_BYTES:
            joined[-1] = b"".join((joined[-1], part))
        else:
            joined.append(part)
    return tuple(joined)
