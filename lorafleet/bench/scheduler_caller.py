"""Sends requests through a scheduler, as any client does, but resumes nothing: what breaks counts."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing

from lorafleet import operations
from lorafleet.bench.metrics import scrape
from lorafleet.bench.requests import Record, Request
from lorafleet.calls import AsyncCalls
from lorafleet.errors import LoraFleetError
from lorafleet.requests import Options, generate_request
from lorafleet.tls.files import Tls


class SchedulerCaller:
    """To be made inside a running event loop. `metrics_urls`: the services' /metrics, if known."""

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        timeout: float | None = None,
        metrics_urls: Sequence[str] = (),
    ) -> None:
        self._calls = AsyncCalls(target, token, tls, timeout)
        self._metrics_urls = metrics_urls

    async def close(self) -> None:
        await self._calls.close()

    async def check(self) -> None:
        """Raises LoraFleetError when nobody is there, or not for this caller."""
        await self._calls.unary(operations.list_models(""))

    async def ask(self, request: Request, record: Record) -> None:
        """Streams: a chunk is a piece."""
        message = generate_request(request.prompt_token_ids, _options(request))
        chunks = self._calls.stream(operations.generate(message), self._calls.timeout)
        record.sent = time.monotonic()
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    if count := len(chunk.token_ids):
                        record.pieces.append((time.monotonic(), count))
        except LoraFleetError as error:
            record.error = error.reason or error.code.name
            record.retry_after = error.retry_after

    async def flush(self) -> None:
        """A call is sent a turn after it was made: of many made in one turn, the first waits for the last."""
        await asyncio.sleep(0)

    async def metrics(self) -> list[str]:
        """Raises OSError."""
        return list(await asyncio.gather(*(asyncio.to_thread(scrape, url) for url in self._metrics_urls)))


def _options(request: Request) -> Options:
    return Options(
        adapter=request.adapter,
        max_new_tokens=request.max_new_tokens,
        ignore_eos=True,
        temperature=0.0,
        seed=0,
    )
