"""Worker processes as their callers see them: a job goes in, an answer comes out.

None of it blocks the event loop. Tenants have the workers by turns.
"""

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from lorafleet.doors.held import Held
from scheduler.errors import TooMuchHeld
from scheduler.workers.program import FRAME_HEADER, READY
from scheduler.workers.turns import WorkerTurns

logger = logging.getLogger(__name__)

# Honest jobs take milliseconds of CPU time, which is what a worker has a limit on; the other limit only ends
# one that got stuck.
WALL_LIMIT_S = 15.0
START_LIMIT_S = 60.0
MAX_WORKERS = 2
MAX_CALLS, MAX_TENANT_CALLS = 1024, 256  # That have a worker or wait for one.


class WorkerStopped(Exception):
    """The job took more time or memory than one may."""


class CannotWork(Exception):
    """The program says at its start that it cannot do any such work; the text says why."""


class Workers:
    """Up to two processes of one program, used from one event loop; `close` ends them."""

    def __init__(
        self,
        what: str,
        reason: str,
        program: Sequence[str],
        *,
        wall_limit_s: float = WALL_LIMIT_S,
        max_calls: Callable[[str], int] = lambda tenant: MAX_TENANT_CALLS,
    ) -> None:
        """`what` jobs are about, and the `reason` of the error that there are too many. `program` is a module
        that serves (program.py), and its arguments. `max_calls` of a tenant may have a worker or wait."""
        self._what, self._program, self._wall_limit_s = what, program, wall_limit_s
        self._turns = WorkerTurns(MAX_WORKERS)
        self._calls = Held(what, MAX_CALLS, partial(TooMuchHeld, reason), max_calls)
        self._idle: list[_Worker] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._begun = False

    async def ask(self, job: Mapping[str, Any], *, tenant: str, key: str = "") -> dict[str, Any]:
        """`tenant` asks, with a request of this key. Raises WorkerStopped, CannotWork and TooMuchHeld."""
        data = json.dumps(job).encode()
        with self._calls.one(tenant, key):
            await self._turns.take(tenant)
            return await self._ask(data, tenant)

    async def close(self) -> None:
        await asyncio.gather(*self._starting)
        while self._idle:
            await self._idle.pop().kill()

    async def _ask(self, job: bytes, tenant: str) -> dict[str, Any]:
        """At the tenant's turn, which ends."""
        if not self._begun:  # Or the second tenant that comes would wait for a start.
            self._begun = True
            self._soon(self._start_others())
        try:
            worker = self._idle.pop() if self._idle else await _Worker.start(self._program)
        except BaseException:
            self._turns.give_back(tenant)
            raise
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._wall_limit_s):
                answer = await worker.ask(job)
        except (TimeoutError, EOFError, OSError) as error:
            self._replace(worker, tenant, began)
            raise WorkerStopped from error
        except BaseException:  # Cancelled: an answer may be under way that is nobody's.
            self._replace(worker, tenant, began)
            raise
        self._idle.append(worker)
        self._turns.give_back(tenant)
        return answer

    def _replace(self, worker: "_Worker", tenant: str, began: float) -> None:
        """While it is still the tenant's turn: nobody else waits until a new worker has come up."""
        worker.kill_soon()
        self._soon(self._start_instead(worker, tenant, began))

    def _soon(self, starting: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(starting)
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start_instead(self, worker: "_Worker", tenant: str, began: float) -> None:
        try:
            await worker.kill()
            await self._start_one()
        finally:
            self._turns.give_back(tenant, stopped_after_s=time.monotonic() - began)

    async def _start_others(self) -> None:
        for _ in range(MAX_WORKERS - 1):
            await self._start_one()

    async def _start_one(self) -> None:
        try:
            self._idle.append(await _Worker.start(self._program))
        except (TimeoutError, EOFError, OSError, CannotWork) as error:
            logger.warning("a worker for %s could not be started: %s", self._what, error)


_PROGRAM = """
import json, runpy, sys
sys.path[:] = json.loads(sys.argv.pop())
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""


class _Worker:
    """A process. One job at a time; of no use any more after one that did not end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, program: Sequence[str]) -> "_Worker":
        # Nothing of our environment is handed on but where modules are found, and that once it is up (-I).
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", _PROGRAM, *program, path),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={},
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                first = await worker._read()
        except BaseException:
            worker.kill_soon()
            raise
        if first != READY:
            await worker.kill()
            raise CannotWork(first.decode())
        return worker

    async def ask(self, job: bytes) -> dict[str, Any]:
        """Raises EOFError when the program was killed."""
        stdin = self._process.stdin
        if stdin is None:
            raise EOFError("the worker has no pipe")
        stdin.write(FRAME_HEADER.pack(len(job)) + job)
        await stdin.drain()
        answer: dict[str, Any] = json.loads(await self._read())
        return answer

    def kill_soon(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def kill(self) -> None:
        self.kill_soon()
        await self._process.wait()

    async def _read(self) -> bytes:
        stdout = self._process.stdout
        if stdout is None:
            raise EOFError("the worker has no pipe")
        header = await stdout.readexactly(FRAME_HEADER.size)
        return await stdout.readexactly(FRAME_HEADER.unpack(header)[0])
