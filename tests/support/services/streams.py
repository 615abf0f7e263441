"""Answers that must not change: what they are when nobody disturbs them, and streams that are watched."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lorafleet import Client, Generation, Unavailable
from tests.support.services.cluster import Pair, wait_until

# Rows of other sequences may move a logit by about 1e-6; a greedy choice closer than this proves nothing.
NEAR_TIE = 5e-5
LOOSE: dict[str, Any] = {"ignore_eos": True}


def undisturbed(client: Client, prompt: list[int], num_tokens: int, **options: Any) -> Generation:
    """The greedy answer on a quiet fleet. Fails if it comes near a tie: choose another prompt then."""
    answer = client.generate(prompt, max_new_tokens=num_tokens, logprobs=2, **LOOSE, **options)
    assert len(answer.token_ids) == num_tokens
    no_near_ties(answer)
    return answer


def no_near_ties(answer: Generation) -> None:
    """Of the two likeliest tokens at each position, where two are allowed."""
    pairs = [position.top for position in answer.logprobs if len(position.top) > 1]
    gaps = [best.logprob - next_best.logprob for best, next_best in pairs]
    assert min(gaps) > NEAR_TIE, f"a near tie, {min(gaps):.1e}, at choice {gaps.index(min(gaps))}"


@dataclass
class Watched:
    """A stream that is read on a thread of its own."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    digest: str = ""
    finish_reason: str = ""
    error: Exception | None = None
    ended: bool = False

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self.tokens) >= count or self.ended, f"{count} tokens")
        assert len(self.tokens) >= count, f"ended after {len(self.tokens)} tokens: {self.error}"

    def wait_end(self) -> "Watched":
        wait_until(lambda: self.ended, "the stream ends")
        return self


def watch(client: Client, prompt: Any, num_tokens: int, **options: Any) -> Watched:
    """Starts a stream; it ends by itself, or when the client is closed. It goes on after the model's own end
    of the answer unless `ignore_eos` says otherwise."""
    watched = Watched()

    def read() -> None:
        try:
            for chunk in client.stream(prompt, max_new_tokens=num_tokens, **{**LOOSE, **options}):
                watched.tokens += chunk.token_ids
                watched.text += chunk.text
                watched.digest = chunk.adapter_digest
                watched.finish_reason = chunk.finish_reason or ""
        except Exception as error:
            watched.error = error
        watched.ended = True

    threading.Thread(target=read, daemon=True).start()
    return watched


@dataclass
class Witness:
    """One long greedy answer after the other, through whatever a test does meanwhile."""

    prompt: list[int]
    adapter: str
    expected: tuple[int, ...]
    client: Client
    running: bool = True
    answers: list[tuple[int, ...]] = field(default_factory=list)
    seen: int = 0
    errors: list[Exception] = field(default_factory=list)

    def loop(self) -> None:
        while self.running and not self.errors:
            tokens: list[int] = []
            try:
                for chunk in self.client.stream(
                    self.prompt, adapter=self.adapter, max_new_tokens=len(self.expected), **LOOSE
                ):
                    tokens += chunk.token_ids
                    self.seen += len(chunk.token_ids)
            except Unavailable as error:
                if tokens:  # what has not begun may well be refused while a test takes the store away
                    self.errors.append(error)
                continue
            except Exception as error:
                self.errors.append(error)
            self.answers.append(tuple(tokens))

    def moves_on(self) -> None:
        """Returns when new tokens have come, all of them right so far."""
        before = self.seen
        wait_until(lambda: self.seen > before or self.errors, "the witness goes on")
        assert not self.errors, self.errors


@contextmanager
def witness(pair: Pair, prompt: list[int], adapter: str, num_tokens: int, **client: Any) -> Iterator[Witness]:
    """Streams while the block runs, and afterwards checks every answer that it got."""
    with pair.client(**client) as own:
        expected = undisturbed(own, prompt, num_tokens, adapter=adapter).token_ids
        watcher = Witness(prompt, adapter, expected, own)
        thread = threading.Thread(target=watcher.loop)
        thread.start()
        try:
            watcher.moves_on()
            yield watcher
        finally:
            watcher.running = False
            thread.join()
    assert not watcher.errors, watcher.errors
    assert set(watcher.answers) == {expected}
