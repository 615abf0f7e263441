"""Tells the other schedulers, through the store and in the background, what tenants ask of this one."""

import asyncio
import logging
import uuid
from collections.abc import Callable
from concurrent.futures import Executor

from adapter_store import NoticeBoard, StoreUnavailable
from adapter_store.lease import LEASE_S
from scheduler.tenants.sharing import Sharing

EVERY_S = 0.5
_END_S = 1.0

logger = logging.getLogger(__name__)


class Exchange:
    """On the event loop; the store is asked in `pool`. Where it is no Redis, its live leases are counted."""

    def __init__(
        self, store: NoticeBoard, sharing: Sharing, pool: Executor, clock: Callable[[], float]
    ) -> None:
        self._store, self._sharing, self._pool, self._clock = store, sharing, pool, clock
        self._holder = uuid.uuid4().hex
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """After this scheduler's lease is held, and before anything is accepted. Raises StoreUnavailable."""
        await self.once()
        self._task = asyncio.create_task(self._run(), name="rates")

    async def stop(self) -> None:
        """Others have its part from now on."""
        if self._task:
            self._task.cancel()
        try:
            await asyncio.wait_for(self._exchange(""), _END_S)
        except (StoreUnavailable, TimeoutError) as error:
            logger.warning("others have this scheduler's part of the rates after %g s: %r", LEASE_S, error)

    async def once(self) -> None:
        told = await self._exchange(self._sharing.tell(self._clock()))
        if told is None:
            leases = await asyncio.get_running_loop().run_in_executor(self._pool, self._store.leases)
            self._sharing.count(len(leases), self._clock())
        else:
            self._sharing.hear(told.values(), self._clock())

    async def _exchange(self, text: str) -> dict[str, str] | None:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._store.exchange, self._holder, text, LEASE_S)

    async def _run(self) -> None:
        away = False
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.once()
                away = False
            except StoreUnavailable as error:
                if not away:
                    logger.warning("each scheduler gives an even part of tenants' rates: %s", error)
                away = True
            except Exception:
                logger.exception("what tenants ask for was not exchanged; the next time tries again")
