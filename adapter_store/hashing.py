"""sha256 of many pieces at once. hashlib lets go of the interpreter, so threads use other cores."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

_INLINE_BYTES = 64 << 10  # hashed faster than handed over
_WAITING_PIECES = 16  # that may be held in memory for the threads
_MAX_THREADS = 8


class ParallelHashes:
    """Pieces go in one by one, their hashes come out in the same order."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))), "sha256")
        self._hashes: list[str | Future[str]] = []

    def add(self, piece: memoryview) -> None:
        """`piece` must not change until it is hashed."""
        if len(piece) <= _INLINE_BYTES:
            self._hashes.append(_sha256(piece))
            return
        self._hashes.append(self._pool.submit(_sha256, piece))
        if len(self._hashes) > _WAITING_PIECES:
            self._settle(len(self._hashes) - _WAITING_PIECES)

    def finish(self) -> Sequence[str]:
        """Of all pieces, in hex."""
        return [self._settle(number) for number in range(len(self._hashes))]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _settle(self, number: int) -> str:
        found = self._hashes[number]
        if isinstance(found, Future):
            self._hashes[number] = found = found.result()
        return found


def _sha256(piece: memoryview) -> str:
    return hashlib.sha256(piece).hexdigest()
