"""One tenant that asks at its own pace, whatever becomes of it: `python -m tests.support.flood.asker`.

A process of its own: its `Load` is one JSON object in standard input, and each `Attempt` one in a line of
standard output, when all of them have ended.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from random import Random

from executor.bench.paced import paced_token
from lorafleet import operations
from lorafleet.calls import AsyncCalls
from lorafleet.errors import LoraFleetError
from lorafleet.requests import generate_request
from lorafleet.v1 import inference_pb2

CALL_S = 60.0
CHANCE_S = 0.1  # As our clients add to what they are told, at most.


@dataclass(frozen=True)
class Load:
    """Requests come by chance, `rate` a second, for `seconds` from `begins_at` on: a time of the monotonic
    clock, which is one for all processes. A request goes to one address for all its tries.

    tokens   of an answer, from and to
    pause_s  who is refused comes again after so long, whatever it was told; None: when it was told to
    tries    that a request has at most
    nice     0 is a tenant like others; above that it has one core, and is niced so
    """

    addresses: Sequence[str]
    token: str
    rate: float
    begins_at: float
    seconds: float
    seed: int
    tokens: tuple[int, int] = (8, 24)
    pause_s: float | None = None
    tries: int = 1000
    nice: int = 0


@dataclass
class Attempt:
    """One call for an answer.

    tries    that the request had before
    came_s   seconds from the beginning of the load to when its server's first word was here
    first_s  from when it was due to its first token; None without one
    whole    it ended with all of its tokens
    reason   of its failure; `told_s`: when to come again
    """

    tries: int
    came_s: float = 0.0
    first_s: float | None = None
    whole: bool = False
    reason: str = ""
    told_s: float | None = None


class Asker:
    """To be made inside a running event loop."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._calls = [AsyncCalls(address, load.token, None, CALL_S) for address in load.addresses]
        self._draw = Random(load.seed)
        self._ends_at = load.begins_at + load.seconds
        self._attempts: list[Attempt] = []

    async def run(self) -> list[Attempt]:
        for calls in self._calls:  # So that they are connected.
            await calls.unary(operations.list_models(""))
        due, number = self._load.begins_at, 0
        async with asyncio.TaskGroup() as asking:
            while (due := due + self._draw.expovariate(self._load.rate)) < self._ends_at:
                await _until(due)
                asking.create_task(self._ask(number, due, self._draw.randint(*self._load.tokens)))
                number += 1
        for calls in self._calls:
            await calls.close()
        return self._attempts

    async def _ask(self, number: int, due: float, tokens: int) -> None:
        prompt = [3 + number % 400, 6, 7]
        name = f"{self._load.token}-{number}"  # It stays: what was promised is kept for it.
        message = generate_request(prompt, {"max_new_tokens": tokens, "request_id": name})
        calls, load = self._calls[number % len(self._calls)], self._load
        for tries in range(load.tries):
            attempt = await self._call(calls, message, due, tries)
            self._attempts.append(attempt)
            if attempt.told_s is None:
                return
            wait_s = attempt.told_s + CHANCE_S * self._draw.random() if load.pause_s is None else load.pause_s
            due = time.monotonic() + wait_s
            if due >= self._ends_at:
                return
            await _until(due)

    async def _call(
        self, calls: AsyncCalls, message: inference_pb2.GenerateRequest, due: float, tries: int
    ) -> Attempt:
        attempt, tokens = Attempt(tries), list[int]()
        try:
            async with aclosing(calls.stream(operations.generate(message), CALL_S)) as chunks:
                async for chunk in chunks:
                    now = time.monotonic()
                    tokens += chunk.token_ids
                    attempt.came_s = attempt.came_s or now - self._load.begins_at
                    if tokens and attempt.first_s is None:
                        attempt.first_s = now - due
        except LoraFleetError as error:
            attempt.came_s = attempt.came_s or time.monotonic() - self._load.begins_at
            attempt.reason, attempt.told_s = error.reason or error.code.name, error.retry_after
        prompt, wanted = message.token_ids.ids, message.stopping.max_new_tokens
        attempt.whole = tokens == [paced_token(prompt, index) for index in range(wanted)]
        return attempt


async def _until(at: float) -> None:
    await asyncio.sleep(at - time.monotonic())


async def _run(load: Load) -> list[Attempt]:
    return await Asker(load).run()


def main() -> None:
    load = Load(**json.load(sys.stdin))
    if load.nice:
        os.nice(load.nice)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for attempt in asyncio.run(_run(load)):
        sys.stdout.write(json.dumps(asdict(attempt)) + "\n")


if __name__ == "__main__":
    main()
