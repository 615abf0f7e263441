"""Sends requests to an engine in a child process (executor/bench/piped.py), without a scheduler."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from lorafleet.bench.errors import EngineEnded
from lorafleet.bench.requests import Record, Request

# One line is one step, one batch of requests or one exposition.
_MAX_LINE_BYTES = 64 << 20

Digests = Callable[[str], str]
"""From a ref to the digest of its version; raises BenchError."""


@dataclass(slots=True)
class _Asked:
    record: Record
    done: asyncio.Event


class EngineCaller:
    """Made by `running_engine`. Token times are those of the engine's thread, on the same clock."""

    def __init__(self, process: asyncio.subprocess.Process, digests: Digests) -> None:
        self.info: Mapping[str, Any] = {}
        self._process = process
        self._digests = digests
        self._asked: dict[int, _Asked] = {}
        self._next = 0
        self._batch: list[dict[str, Any]] = []
        self._exposition: asyncio.Future[str] | None = None
        self._last_log_line = ""
        self._ended = asyncio.Event()

    async def ask(self, request: Request, record: Record) -> None:
        """What is asked within one turn of the loop goes to the engine together."""
        number, self._next = self._next, self._next + 1
        asked = self._asked[number] = _Asked(record, asyncio.Event())
        digest = self._digests(request.adapter) if request.adapter else ""
        if not self._batch:
            asyncio.get_running_loop().call_soon(self._send_batch)
        self._batch.append(
            {
                "number": number,
                "prompt": request.prompt_token_ids,
                "output": request.max_new_tokens,
                "digest": digest,
            }
        )
        try:
            await asked.done.wait()
        except asyncio.CancelledError:
            self._send({"cancel": [number]})
            raise
        finally:
            self._asked.pop(number, None)
        if self._ended.is_set():
            raise self._lost()

    async def flush(self) -> None:
        """Nothing: what is asked in one turn reaches the engine at once."""

    async def metrics(self) -> list[str]:
        self._exposition = asyncio.get_running_loop().create_future()
        self._send({"metrics": True})
        slots = self.info["max_loras"]  # which is a gauge of the server's, not of the engine's
        return [f"lorafleet_executor_slots {slots}\n" + await self._exposition]

    def drop(self, refs: Sequence[str]) -> None:
        """Forget the versions in host memory and slots, so that they come from the store again."""
        self._send({"drop": [self._digests(ref) for ref in refs]})

    async def wait_ready(self) -> None:
        """Raises EngineEnded when it cannot start."""
        line = await self._line()
        if line is None:
            raise self._lost()
        self.info = line["ready"]

    async def listen(self) -> None:
        """Take in what the engine says, until it ends."""
        while (line := await self._line()) is not None:
            if "metrics" in line and self._exposition:
                self._exposition.set_result(line["metrics"])
            else:
                self._take_step(line)
        self._ended.set()
        for asked in self._asked.values():
            asked.done.set()
        if self._exposition and not self._exposition.done():
            self._exposition.set_exception(self._lost())

    async def follow_log(self, log: Callable[[str], None]) -> None:
        """Pass its log on, until it ends."""
        stream = self._process.stderr
        while stream and (line := (await stream.readline()).decode(errors="replace").rstrip()):
            self._last_log_line = line
            log(line)

    def _take_step(self, step: Mapping[str, Any]) -> None:
        at = step["at"]
        for number in step["tokens"]:
            if asked := self._asked.get(number):
                asked.record.pieces.append((at, 1))
        for number, error in step["ends"]:
            if asked := self._asked.get(number):
                asked.record.error = error
                asked.done.set()

    def _send_batch(self) -> None:
        batch, self._batch = self._batch, []
        self._send({"ask": batch})

    def _send(self, command: Mapping[str, Any]) -> None:
        if self._process.stdin and not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(command).encode() + b"\n")

    async def _line(self) -> Mapping[str, Any] | None:
        if self._process.stdout is None or not (line := await self._process.stdout.readline()):
            return None
        message: Mapping[str, Any] = json.loads(line)
        return message

    def _lost(self) -> EngineEnded:
        return EngineEnded(f"the engine has ended: {self._last_log_line or 'it logged nothing'}")


@asynccontextmanager
async def running_engine(
    arguments: Sequence[str], digests: Digests, log: Callable[[str], None]
) -> AsyncIterator[EngineCaller]:
    """A ready engine; `arguments` are the executor's. It ends on leaving. Raises EngineEnded."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "executor.bench.piped", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_MAX_LINE_BYTES,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # a Ctrl-C is for us: what was measured is told before the engine ends
    )
    caller = EngineCaller(process, digests)
    tasks = [asyncio.create_task(caller.follow_log(log))]
    try:
        await caller.wait_ready()
        tasks.append(asyncio.create_task(caller.listen()))
        yield caller
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        for task in tasks:
            task.cancel()
