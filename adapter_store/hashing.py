"""sha256 of many pieces at once. hashlib lets go of the interpreter, so threads use other cores."""

import hashlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from adapter_store.cores import num_threads

_JOB_BYTES = 1 << 20  # handed to a thread at once: half a millisecond's work
_WAITING_JOBS = 32  # what may be held in memory for the threads


class ParallelHashes:
    """Pieces go in one by one, their hashes come out in the same order."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(num_threads(), "sha256")
        self._job, self._job_bytes = list[memoryview](), 0
        self._waiting = deque[Future[list[str]]]()
        self._hashes = list[str]()

    def add(self, piece: memoryview) -> None:
        """`piece` must not change until it is hashed."""
        self._job.append(piece)
        self._job_bytes += len(piece)
        if self._job_bytes >= _JOB_BYTES:
            self._start()
        if len(self._waiting) > _WAITING_JOBS:
            self._hashes += self._waiting.popleft().result()

    def finish(self) -> Sequence[str]:
        """Of all pieces, in hex."""
        self._start()
        while self._waiting:
            self._hashes += self._waiting.popleft().result()
        return self._hashes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _start(self) -> None:
        self._waiting.append(self._pool.submit(_sha256s, self._job))
        self._job, self._job_bytes = [], 0


def _sha256s(pieces: Sequence[memoryview]) -> list[str]:
    return [hashlib.sha256(piece).hexdigest() for piece in pieces]
