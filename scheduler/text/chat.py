"""Turns conversations into prompts: the model's template in a thread, an adapter's in a process.

The model's template belongs to the operator, as the model does, and is trusted to end. An adapter's template
is any tenant's program: it runs in a sandbox inside a worker process that is killed when it takes too long,
and that a new one replaces. Neither blocks the event loop. Tenants have the workers by turns.
"""

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial

from lorafleet.doors.held import Held
from scheduler.errors import InvalidRequest, TooMuchHeld
from scheduler.text.template import (
    FRAME_HEADER,
    READY,
    InvalidTemplate,
    RefusedConversation,
    TemplateFailed,
    render,
)
from scheduler.text.template_turns import TemplateTurns

logger = logging.getLogger(__name__)

# An honest template takes milliseconds of CPU time; the other limit only ends a worker that got stuck.
CPU_LIMIT_S = 1.0
WALL_LIMIT_S = 15.0
START_LIMIT_S = 60.0
MAX_WORKERS = 2
NO_TOKENS: Mapping[str, str] = {}
MAX_CALLS, MAX_TENANT_CALLS = 1024, 256  # That have a worker or wait for one.

_TOO_MANY = partial(TooMuchHeld, "TOO_MANY_TEMPLATES")
_KINDS = {kind.__name__: kind for kind in (TemplateFailed, InvalidTemplate, RefusedConversation)}


class CostlyTemplate(TemplateFailed):
    """The template takes more time or memory than one may."""


class ChatTemplates:
    """Renders conversations on one event loop; `close` ends the worker processes."""

    def __init__(
        self,
        base_template: str | None,
        special_tokens: Mapping[str, str],
        pool: Executor,
        *,
        cpu_limit_s: float = CPU_LIMIT_S,
        wall_limit_s: float = WALL_LIMIT_S,
        max_calls: Callable[[str], int] = lambda tenant: MAX_TENANT_CALLS,
    ) -> None:
        """`max_calls` of a tenant may have a worker or wait for one."""
        self._base_template = base_template
        self._special_tokens = dict(special_tokens)
        self._pool = pool
        self._cpu_limit_s = cpu_limit_s
        self._wall_limit_s = wall_limit_s
        self._turns = TemplateTurns(MAX_WORKERS)
        self._calls = Held("chats with templates of adapters", MAX_CALLS, _TOO_MANY, max_calls)
        self._idle: list[_Worker] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._begun = False

    async def render(
        self,
        messages: Sequence[Mapping[str, str]],
        adapter_template: str | None,
        adapter_tokens: Mapping[str, str] = NO_TOKENS,
        *,
        tenant: str = "",
        key: str = "",
    ) -> str:
        """The prompt by the adapter's template or else the model's. `adapter_tokens` are special tokens of
        the adapter's own, in place of the model's of these names. `tenant` asks for it, with
        a request of this key. Raises InvalidRequest, TooMuchHeld."""
        try:
            if adapter_template is not None:
                return await self.render_apart(
                    adapter_template, messages, adapter_tokens, tenant=tenant, key=key
                )
            if self._base_template is None:
                raise InvalidRequest("chat", "the model has no chat template; send text or token ids")
            loop = asyncio.get_running_loop()
            tokens = {**self._special_tokens, **adapter_tokens}
            return await loop.run_in_executor(self._pool, render, self._base_template, messages, tokens)
        except TemplateFailed as error:
            raise InvalidRequest("chat", str(error)) from error

    async def close(self) -> None:
        await asyncio.gather(*self._starting)
        while self._idle:
            await self._idle.pop().kill()

    async def render_apart(
        self,
        template: str,
        messages: Sequence[Mapping[str, str]],
        adapter_tokens: Mapping[str, str] = NO_TOKENS,
        *,
        tenant: str = "",
        key: str = "",
    ) -> str:
        """The prompt by a template that nobody vouches for. Raises TemplateFailed, of the kind that it is,
        and TooMuchHeld."""
        tokens = {**self._special_tokens, **adapter_tokens}
        job = json.dumps({"template": template, "messages": messages, "special_tokens": tokens}).encode()
        with self._calls.one(tenant, key):
            await self._turns.take(tenant)
            return await self._render(job, tenant)

    async def _render(self, job: bytes, tenant: str) -> str:
        """At the tenant's turn, which ends."""
        if not self._begun:  # Or the second tenant that comes would wait for a start.
            self._begun = True
            self._soon(self._start_others())
        try:
            worker = self._idle.pop() if self._idle else await _Worker.start(self._cpu_limit_s)
        except BaseException:
            self._turns.give_back(tenant)
            raise
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._wall_limit_s):
                text = await worker.render(job)
        except TemplateFailed:
            self._give_back(worker, tenant)
            raise
        except (TimeoutError, EOFError, OSError) as error:
            self._replace(worker, tenant, began)
            raise CostlyTemplate("the adapter's chat template takes too much time or memory") from error
        except BaseException:  # Cancelled: an answer may be under way that is nobody's.
            self._replace(worker, tenant, began)
            raise
        self._give_back(worker, tenant)
        return text

    def _give_back(self, worker: "_Worker", tenant: str) -> None:
        self._idle.append(worker)
        self._turns.give_back(tenant)

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
            self._idle.append(await _Worker.start(self._cpu_limit_s))
        except (TimeoutError, EOFError, OSError) as error:
            logger.warning("a worker for chat templates could not be started: %s", error)


_PROGRAM = """
import json, runpy, sys
sys.path[:] = json.loads(sys.argv.pop())
runpy.run_module("scheduler.text.template", run_name="__main__")
"""


class _Worker:
    """A process of scheduler/text/template.py. One job at a time; of no use any more after a failed one."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, cpu_limit_s: float) -> "_Worker":
        # Nothing of our environment is handed on but where modules are found, and that once it is up (-I).
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", _PROGRAM, str(cpu_limit_s), path),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={},
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                if await worker._read() != READY:
                    raise EOFError("no answer from a new template worker")
        except BaseException:
            worker.kill_soon()
            raise
        return worker

    async def render(self, job: bytes) -> str:
        """Raises TemplateFailed as the program says, EOFError when the program was killed."""
        stdin = self._process.stdin
        if stdin is None:
            raise EOFError("the template worker has no pipe")
        stdin.write(FRAME_HEADER.pack(len(job)) + job)
        await stdin.drain()
        answer = json.loads(await self._read())
        if "error" in answer:
            raise _KINDS[answer["kind"]](answer["error"])
        return str(answer["text"])

    def kill_soon(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def kill(self) -> None:
        self.kill_soon()
        await self._process.wait()

    async def _read(self) -> bytes:
        stdout = self._process.stdout
        if stdout is None:
            raise EOFError("the template worker has no pipe")
        header = await stdout.readexactly(FRAME_HEADER.size)
        return await stdout.readexactly(FRAME_HEADER.unpack(header)[0])
