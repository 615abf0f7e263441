"""The client for asyncio; lorafleet/client.py is the same with plain calls."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Self, Unpack

import grpc

from lorafleet import operations, results
from lorafleet.adapters import AsyncAdapters
from lorafleet.answer import Answer, RetryPolicy
from lorafleet.calls import AsyncCalls
from lorafleet.client import DEFAULT_TARGET
from lorafleet.errors import LoraFleetError
from lorafleet.requests import Options, Prompt, generate_request
from lorafleet.tls.files import Tls


class AsyncClient:
    """A connection to a scheduler, to be made inside a running event loop. Arguments and methods: Client's.

    async with AsyncClient() as client:
        async for chunk in client.stream("The capital of France is", max_new_tokens=16):
            print(chunk.text, end="")
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        token: str | None = None,
        tls: Tls | grpc.ChannelCredentials | None = None,
        timeout: float | None = None,
        resume_timeout: float = 60.0,
        refused_attempts: int = 1,
    ) -> None:
        self._calls = AsyncCalls(target, token, tls, timeout)
        self._policy = RetryPolicy(resume_timeout, refused_attempts=refused_attempts)
        self.adapters = AsyncAdapters(self._calls)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what is under way."""
        await self._calls.close()

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> results.Generation:
        """The whole answer. lorafleet.Options lists the options."""
        answer = self._answer(prompt, options)
        async with aclosing(self._run(answer)) as chunks:
            async for _ in chunks:
                pass
        return answer.generation()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGenerator[results.Chunk, None]:
        """The answer as it is made. It is asked for at the first `anext`; `aclose` cancels the call.

        When connection or server are lost, it goes on where it was, with nothing repeated or missing.
        """
        return self._run(self._answer(prompt, options))

    async def tokenize(
        self, prompt: str | Sequence[Mapping[str, str]], *, adapter: str | None = None
    ) -> results.Tokenization:
        """What a text or a conversation looks like to the model."""
        return await self._calls.unary(operations.tokenize(prompt, adapter))

    async def models(self) -> results.Models:
        """The base model and the adapters that the caller may use."""
        return operations.join_models(await self._calls.pages(operations.list_models))

    async def fleet(self) -> results.Fleet:
        """The executors behind the scheduler, as they are now."""
        async with aclosing(self._calls.stream(operations.watch_fleet(), self._calls.timeout)) as snapshots:
            return await anext(snapshots)

    def watch_fleet(self, interval: float = 1.0) -> AsyncGenerator[results.Fleet, None]:
        """The same now and at each change, at least `interval` seconds apart. Closing it ends the call."""
        return self._calls.stream(operations.watch_fleet(interval), None)

    async def cordon(self, address: str, cordoned: bool = True) -> results.Executor:
        """Send no new requests to the executor there, or send them again: until the scheduler restarts."""
        return await self._calls.unary(operations.cordon(address, cordoned))

    async def drain(self, address: str) -> results.Executor:
        """Cordon the executor and wait until its requests have ended or moved."""
        return await self._calls.unary(operations.drain(address))

    def _answer(self, prompt: Prompt, options: Options) -> Answer:
        timeout = options.get("timeout")
        if timeout is None:
            timeout = self._calls.timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        return Answer(generate_request(prompt, options), self._policy, deadline)

    async def _run(self, answer: Answer) -> AsyncGenerator[results.Chunk, None]:
        while not answer.done:
            error = None
            request = answer.next_request()
            operation = operations.generate(request, again=answer.accepted, answer_id=answer.answer_id)
            try:
                async with aclosing(
                    self._calls.stream(operation, answer.time_left(time.monotonic()))
                ) as messages:
                    async for message in messages:
                        yield answer.accept(message)
            except LoraFleetError as broken:
                error = broken
            await asyncio.sleep(answer.after_break(error, time.monotonic()))
