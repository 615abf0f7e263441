"""The client, with plain calls; lorafleet/aio.py is the same for asyncio."""

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Self, Unpack

import grpc

from lorafleet import operations, results
from lorafleet.adapters import Adapters
from lorafleet.answer import Answer, RetryPolicy
from lorafleet.calls import Calls
from lorafleet.errors import LoraFleetError
from lorafleet.requests import Options, Prompt, generate_request
from lorafleet.tls.files import Tls

DEFAULT_TARGET = "127.0.0.1:50051"


class Client:
    """A connection to a scheduler; safe to use from several threads.

    with Client() as client:
        print(client.generate("The capital of France is", adapter="geo", max_new_tokens=16).text)

    Every method raises a LoraFleetError (lorafleet/errors.py). target: host:port, or any target of gRPC. With
    several schedulers, as "ipv4:10.0.0.7:50051,10.0.0.8:50051" or a name that DNS has several addresses for,
    calls go to the first that can be reached, and so do answers whose scheduler is lost. tls: files of a CA
    and of a certificate of one's own; Tls() trusts the roots that gRPC brings; without it nothing is
    encrypted. timeout: seconds for a call that names none, None is no limit. resume_timeout: how long an
    accepted answer is taken up again while the server is away. refused_attempts: how often a request is
    tried that a queue or a quota refuses, each time after the delay that the server tells.
    adapters: push, list, alias and delete adapters.
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
        self._calls = Calls(target, token, tls, timeout)
        self._policy = RetryPolicy(resume_timeout, refused_attempts=refused_attempts)
        self.adapters = Adapters(self._calls)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is under way."""
        self._calls.close()

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> results.Generation:
        """The whole answer. lorafleet.Options lists the options."""
        answer = self._answer(prompt, options)
        for _ in self._run(answer):
            pass
        return answer.generation()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Generator[results.Chunk, None, None]:
        """The answer as it is made. It is asked for at the first `next`; closing it cancels the call.

        When connection or server are lost, it goes on where it was, with nothing repeated or missing.
        """
        return self._run(self._answer(prompt, options))

    def tokenize(
        self, prompt: str | Sequence[Mapping[str, str]], *, adapter: str | None = None
    ) -> results.Tokenization:
        """What a text or a conversation looks like to the model."""
        return self._calls.unary(operations.tokenize(prompt, adapter))

    def models(self) -> results.Models:
        """The base model and the adapters that the caller may use."""
        return operations.join_models(self._calls.pages(operations.list_models))

    def fleet(self) -> results.Fleet:
        """The executors behind the scheduler, as they are now."""
        with closing(self._calls.stream(operations.watch_fleet(), self._calls.timeout)) as snapshots:
            return next(snapshots)

    def watch_fleet(self, interval: float = 1.0) -> Generator[results.Fleet, None, None]:
        """The same now and at each change, at least `interval` seconds apart. Closing it ends the call."""
        return self._calls.stream(operations.watch_fleet(interval), None)

    def cordon(self, address: str, cordoned: bool = True) -> results.Executor:
        """Send no new requests to the executor there, or send them again: until the scheduler restarts."""
        return self._calls.unary(operations.cordon(address, cordoned))

    def drain(self, address: str) -> results.Executor:
        """Cordon the executor and wait until its requests have ended or moved."""
        return self._calls.unary(operations.drain(address))

    def _answer(self, prompt: Prompt, options: Options) -> Answer:
        timeout = options.get("timeout")
        if timeout is None:
            timeout = self._calls.timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        return Answer(generate_request(prompt, options), self._policy, deadline)

    def _run(self, answer: Answer) -> Generator[results.Chunk, None, None]:
        while not answer.done:
            error = None
            request = answer.next_request()
            operation = operations.generate(request, again=answer.accepted, answer_id=answer.answer_id)
            try:
                with closing(self._calls.stream(operation, answer.time_left(time.monotonic()))) as messages:
                    for message in messages:
                        yield answer.accept(message)
            except LoraFleetError as broken:
                error = broken
            time.sleep(answer.after_break(error, time.monotonic()))
