"""Callers of a fleet in trouble, and what must hold of every answer that they get."""

import random
import time
from collections.abc import Mapping
from typing import Any

from lorafleet import Client, FinishReason, Generation, LoraFleetError
from tests.support.chaos.run import NUM_TOKENS, QUESTIONS, World
from tests.support.services.streams import LOOSE


class Caller:
    """Asks one question after the other, and checks what comes."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._draw = world, random.Random(seed)
        self.problem = ""

    def run(self) -> None:
        clients = self._world.clients()
        try:
            while self._world.goes_on:
                self._ask(self._draw.choice(clients))
        finally:
            for client in clients:
                client.close()

    def _ask(self, client: Client) -> None:
        draw, world = self._draw, self._world
        number = draw.randrange(len(QUESTIONS))
        wanted = draw.randint(1, NUM_TOKENS)
        name = draw.choice(("", *world.names * 2, *(("nobody",) if draw.random() < 0.1 else ())))
        digest = draw.choice([*world.digests]) if name and draw.random() < 0.3 else ""
        options, leaves_after = self._manner(number)
        answer = Answer(world, name, digest, number, wanted, options)
        try:
            stream = client.stream(
                QUESTIONS[number].prompt,
                adapter=f"{name}@{digest}" if digest else name or None,
                max_new_tokens=wanted,
                **LOOSE,
                **QUESTIONS[number].options,
                **options,
            )
            for chunk in stream:
                answer.take(chunk)
                if draw.random() < 0.02:
                    time.sleep(draw.random())
                if len(answer.tokens) >= leaves_after:
                    stream.close()
                    answer.leave()
                    return
            answer.end()
        except LoraFleetError as error:
            answer.fail(error)

    def _manner(self, number: int) -> tuple[dict[str, Any], int]:
        """Options of this request, and after how many tokens its client goes away."""
        draw, world = self._draw, self._world
        answers = [tokens for (_, each), tokens in world.truth.items() if each == number]
        manners = ("plain", "plain", "plain", "leave", "deadline", "limit", "token", "text", "logprobs")
        match draw.choice(manners):
            case "leave":
                return {}, draw.randint(1, NUM_TOKENS)
            case "deadline":
                return {"timeout": draw.uniform(0.01, 1.0)}, NUM_TOKENS + 1
            case "limit":
                return {"time_limit_ms": draw.randint(1, 800)}, NUM_TOKENS + 1
            case "token":
                return {"stop_token_ids": [draw.choice(draw.choice(answers))]}, NUM_TOKENS + 1
            case "text":
                text = world.tokenizer.decode(draw.choice(answers))
                start = draw.randrange(len(text) - 3)
                stop = text[start : start + 3]
                return {} if "\ufffd" in stop else {"stop": stop}, NUM_TOKENS + 1
            case "logprobs":
                return {"logprobs": 1, "prompt_logprobs": draw.choice((None, 0))}, NUM_TOKENS + 1
        return {}, NUM_TOKENS + 1


class Answer:
    """One answer: is it, so far and at its end, that of the adapter that was asked for?"""

    def __init__(
        self, world: World, name: str, digest: str, number: int, wanted: int, options: Mapping[str, Any]
    ) -> None:
        self._world, self._name, self._asked_for, self._number = world, name, digest, number
        self._wanted, self._options = wanted, options
        self._asked_at = time.monotonic()
        self._digest: str | None = None
        self.tokens: list[int] = []
        self._text = ""
        self._logprobs = 0
        self._prompt_logprobs = 0
        self._reason: FinishReason | None = None

    def take(self, chunk: Any) -> None:
        if self._digest is None:
            self._digest = chunk.adapter_digest
            self._check_digest(chunk.adapter_digest)
        self._check(chunk.adapter_digest == self._digest, "another version in mid-stream")
        self._check(self._reason is None, "something after the end")
        self._check(not chunk.token_ids or chunk.output_index == len(self.tokens), "a gap, or a repetition")
        self.tokens += chunk.token_ids
        self._text += chunk.text
        self._logprobs += len(chunk.logprobs)
        self._prompt_logprobs += len(chunk.prompt_logprobs)
        self._reason = chunk.finish_reason
        self._check(tuple(self.tokens) == self._truth[: len(self.tokens)], "other tokens")

    def take_whole(self, generation: Generation) -> None:
        """In place of its chunks."""
        self._digest, self._text = generation.adapter_digest, generation.text
        self._check_digest(generation.adapter_digest)
        self.tokens += generation.token_ids
        self._check(generation.token_ids == self._truth[: len(self.tokens)], "other tokens")
        self._reason = generation.finish_reason

    def leave(self) -> None:
        self._world.outcomes["left"] += 1

    def fail(self, error: LoraFleetError) -> None:
        ref = f"{self._name}@{self._asked_for}" if self._asked_for else self._name
        self._world.failed(error, ref, self._asked_at, self._options)

    def end(self) -> None:
        self._world.outcomes[str(self._reason)] += 1
        decode, count = self._world.tokenizer.decode, len(self.tokens)
        if "logprobs" in self._options:
            self._check(self._logprobs == count, "log-probabilities")
            asked = self._options["prompt_logprobs"] is not None
            prompt = len(QUESTIONS[self._number].prompt)
            self._check(self._prompt_logprobs == asked * prompt, "log-probabilities of the prompt")
        full = self._truth[: self._wanted]
        stops, stop = self._options.get("stop_token_ids"), self._options.get("stop")
        if self._reason is FinishReason.TIME_LIMIT:
            self._check("time_limit_ms" in self._options, "a time limit")
        elif stops and stops[0] in full:
            self._check(count == full.index(stops[0]) + 1, "the end at a stop token")
            self._check(self._reason is FinishReason.STOP, "the reason")
        elif stop and stop in decode(full):
            self._check(stop in decode(self.tokens), "the end at a text")
            self._check(stop not in decode(self.tokens[:-1]), "tokens after the end")
            self._check(self._text == decode(full)[: decode(full).index(stop)], "the text before a stop")
            self._check(self._reason is FinishReason.STOP, "the reason")
        else:
            self._check(count == self._wanted and self._reason is FinishReason.LENGTH, "the length")
            self._check(self._text == decode(self.tokens), "the text")

    @property
    def _truth(self) -> tuple[int, ...]:
        return self._world.truth[self._digest or "", self._number]

    def _check_digest(self, digest: str) -> None:
        now = time.monotonic()
        if not self._name:
            self._check(digest == "", "an adapter for the base")
        elif self._asked_for:
            self._check(digest == self._asked_for, "another version than asked for")
        elif self._name in self._world.aliases.spans:
            self._check(
                self._world.aliases.allow(self._name, digest, self._asked_at, now), "what the alias never was"
            )
        else:
            self._check(False, "an answer from nobody")

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            self._world.problems.append(f"{what}: {self.__dict__ | {'_world': None}}")
