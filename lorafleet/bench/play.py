"""Plays lanes of requests, each request when it is due, against whatever answers them."""

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from lorafleet.bench.requests import Lane, Record, Recording, Request


class Caller(Protocol):
    """What is measured. Used within one event loop."""

    async def ask(self, request: Request, record: Record) -> None:
        """Ask, and fill the record until the answer has ended, well or not. Cancelling it ends the request.

        Raises EngineEnded when nothing can be measured any more; a failure of the request is `record.error`.
        """

    async def flush(self) -> None:
        """Comes between two requests of a burst: what was asked may go out before more is asked."""

    async def metrics(self) -> list[str]:
        """The expositions of executors and scheduler, in the Prometheus text format, as far as known."""


async def play(lanes: Sequence[Lane], caller: Caller, recording: Recording) -> None:
    """Returns when every lane but the background ones is done; `recording` is filled on the way.

    Raises what `Caller.ask` raises.
    """
    recording.started = time.monotonic()
    try:
        async with asyncio.TaskGroup() as background:
            behind = [
                background.create_task(_play_lane(lane, caller, recording))
                for lane in lanes
                if lane.background
            ]
            async with asyncio.TaskGroup() as foreground:
                for lane in lanes:
                    if not lane.background:
                        foreground.create_task(_play_lane(lane, caller, recording))
            for task in behind:
                task.cancel()
    except* Exception as errors:
        raise _first(errors) from None
    finally:
        recording.ended = time.monotonic()


async def _play_lane(lane: Lane, caller: Caller, recording: Recording) -> None:
    room = asyncio.Semaphore(lane.max_concurrency) if lane.max_concurrency else None
    async with asyncio.TaskGroup() as group:
        for request in lane.requests:
            due = recording.started + request.at
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            if room:
                await room.acquire()
            record = Record(lane.name, request, due, time.monotonic())
            recording.records.append(record)
            group.create_task(_ask(caller, record, room))
            await caller.flush()


async def _ask(caller: Caller, record: Record, room: asyncio.Semaphore | None) -> None:
    try:
        await caller.ask(record.request, record)
        record.ended = time.monotonic() if not record.pieces else record.pieces[-1][0]
    except asyncio.CancelledError:
        record.cut = True
        raise
    finally:
        if room:
            room.release()


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first
