"""Turns conversations into prompts: the model's template in a thread, an adapter's in a process.

The model's template belongs to the operator, as the model does, and is trusted to end. An adapter's template
is any tenant's program: it runs in a sandbox inside a worker process that is stopped when it takes too much
(scheduler/workers). Neither blocks the event loop.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor

from scheduler.errors import InvalidRequest
from scheduler.text.template import InvalidTemplate, RefusedConversation, TemplateFailed, render
from scheduler.workers.workers import MAX_TENANT_CALLS, WALL_LIMIT_S, Workers, WorkerStopped

CPU_LIMIT_S = 1.0
NO_TOKENS: Mapping[str, str] = {}

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
        self._workers = Workers(
            "chats with templates of adapters",
            "TOO_MANY_TEMPLATES",
            ("scheduler.text.template", str(cpu_limit_s)),
            wall_limit_s=wall_limit_s,
            max_calls=max_calls,
        )

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
        await self._workers.close()

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
        job = {"template": template, "messages": messages, "special_tokens": tokens}
        try:
            answer = await self._workers.ask(job, tenant=tenant, key=key)
        except WorkerStopped as error:
            raise CostlyTemplate("the adapter's chat template takes too much time or memory") from error
        if "error" in answer:
            raise _KINDS[answer["kind"]](answer["error"])
        return str(answer["text"])
