"""One record an answer, written before its client learns of the end; or kept until it can be written."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

from lorafleet.usage.record import Record, encode
from scheduler.errors import LedgerUnavailable
from scheduler.ledger.files import LedgerFile
from scheduler.ledger.metrics import LedgerMetrics
from scheduler.ledger.shipper import Shipper

logger = logging.getLogger(__name__)

TEND_S = 0.25
SYNC_S = 1.0
LAST_TURN_S = 5.0
# Records that wait in memory, of up to 600 bytes. While some wait only those are added that were accepted
# before; half of the room is for them, and half for answers that clients ask for again.
MAX_UNWRITTEN = 100_000
_AT_ONCE = 2_000  # Of them, written in one go of the event loop.


class Ledger:
    """On the event loop. Without a file it only counts; `shipper` is for a file, where there is a Redis."""

    def __init__(
        self,
        metrics: LedgerMetrics,
        file: LedgerFile | None = None,
        shipper: Shipper | None = None,
        clock: Callable[[], float] = time.time,
        max_unwritten: int = MAX_UNWRITTEN,
    ) -> None:
        """`clock` tells unix seconds."""
        self._metrics, self._file, self._shipper = metrics, file, shipper
        self._clock, self._max_unwritten = clock, max_unwritten
        self._unwritten = deque[bytes]()
        self._tending: asyncio.Task[None] | None = None
        metrics.unwritten_records.set_function(lambda: len(self._unwritten))
        if shipper is not None:
            metrics.unshipped_seconds.set_function(lambda: max(0.0, clock() - shipper.all_shipped_at))

    @property
    def writable(self) -> bool:
        """Whether all records are in the file."""
        return not self._unwritten

    def check(self, *, again: bool) -> None:
        """Raises LedgerUnavailable for a request that would be served without a record. `again`: it was
        accepted before, and is let in while there is room for its record in memory."""
        waiting = len(self._unwritten)
        if waiting and not (again and waiting < self._max_unwritten // 2):
            raise LedgerUnavailable()

    def record(self, record: Record) -> None:
        """Never fails: what cannot be written is kept in memory."""
        self._metrics.ended(record)
        if self._file is not None:
            self._write(self._file, encode(record))

    def start(self) -> None:
        if self._file is not None:
            self._tending = asyncio.create_task(self._tend(self._file), name="ledger")
        if self._shipper is not None:
            self._shipper.start()

    async def stop(self) -> None:
        """When all requests have ended. What cannot be written now goes into the log."""
        if self._tending is not None:
            self._tending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._tending
        if self._file is not None:
            self._write_waiting(self._file, len(self._unwritten))
            for line in self._unwritten:
                self._lose(line)
            await asyncio.to_thread(self._close, self._file)

    def _write(self, file: LedgerFile, line: bytes) -> None:
        if self._unwritten:
            self._keep(line)
            return
        try:
            file.append(line)
        except OSError as error:
            logger.error("usage records cannot be written, new requests are refused: %s", error)
            self._keep(line)

    def _keep(self, line: bytes) -> None:
        if len(self._unwritten) < self._max_unwritten:
            self._unwritten.append(line)
        else:
            self._lose(line)

    def _lose(self, line: bytes) -> None:
        self._metrics.lost_records.inc()
        logger.error("a usage record is not in the ledger: %s", line.decode().rstrip())

    def _write_waiting(self, file: LedgerFile, most: int) -> None:
        waited = bool(self._unwritten)
        try:
            for _ in range(min(most, len(self._unwritten))):
                file.append(self._unwritten[0])
                self._unwritten.popleft()
        except OSError:
            return
        if waited and self.writable:
            logger.info("usage records are written again")

    async def _tend(self, file: LedgerFile) -> None:
        synced_at, trouble = self._clock(), ""
        while True:
            await asyncio.sleep(TEND_S)
            self._write_waiting(file, _AT_ONCE)
            if 0 <= self._clock() - synced_at < SYNC_S:
                continue
            synced_at = self._clock()
            try:
                await asyncio.to_thread(file.sync)
                trouble = ""
            except OSError as error:
                if str(error) != trouble:
                    logger.error("usage records may not be on the disk: %s", error)
                trouble = str(error)

    def _close(self, file: LedgerFile) -> None:
        try:
            file.close()
        except OSError as error:
            logger.error("usage records may not be on the disk: %s", error)
        if self._shipper is not None:
            self._shipper.stop(LAST_TURN_S)
