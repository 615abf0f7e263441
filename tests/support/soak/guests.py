"""Callers of every kind: patient and hasty, deaf, lost and wrong; all answers are held against known ones."""

import time
from collections.abc import Callable
from contextlib import closing, suppress

from lorafleet import Client, LoraFleetError
from lorafleet.v1 import common_pb2, inference_pb2
from tests.support.chaos.run import NUM_TOKENS, QUESTIONS
from tests.support.chaos.traffic import Caller
from tests.support.flood import http2
from tests.support.services.streams import LOOSE
from tests.support.soak.causes import Cause, name_of
from tests.support.soak.tenants import BRIEF, CHAT, CHAT_TOKENS, CONVERSATION, OF_ANSWERS, Tenant

STREAM = "/lorafleet.v1.Inference/GenerateStream"
OF_ASKING = (Cause.STORE_AWAY, Cause.SCHEDULER_AWAY)
DEAF_TOKENS = 700  # With 20 log-probabilities each they are more than a stream's window holds.


class Guest(Caller):
    """Its streams are a Caller's; the rest is in `_acts`, with how often each comes."""

    def __init__(self, tenant: Tenant, seed: int, pause_s: float, deaf_s: float) -> None:
        super().__init__(tenant, seed)
        self._tenant, self._pause_s, self._deaf_s = tenant, pause_s, deaf_s
        acts: dict[Callable[[Client], None], float] = {
            self._ask: 8,
            self._whole: 3,
            self._chat: 2,
            self._brief: 3,
            self._refused: 2,
            self._newcomer: 1,
            self._vanish: 1,
            self._look: 1,
            self._deaf: 0.1 if deaf_s else 0,
        }
        self._acts, self._weights = [*acts], [*acts.values()]

    def run(self) -> None:
        clients = self._tenant.clients()
        try:
            while self._tenant.goes_on:
                [act] = self._draw.choices(self._acts, self._weights)
                act(self._draw.choice(clients))
                self._tenant.causes.did(act.__name__.strip("_"))
                self._tenant.stops.wait(self._draw.uniform(0, self._pause_s))
        finally:
            for client in clients:
                client.close()

    def _whole(self, client: Client) -> None:
        name, wanted = self._draw.choice(("", *self._tenant.names)), self._draw.randint(1, NUM_TOKENS)
        self._listen(client, name, "", self._draw.randrange(len(QUESTIONS)), wanted, whole=True)

    def _chat(self, client: Client) -> None:
        self._listen(client, self._draw.choice(("", *self._tenant.names)), "", CHAT, CHAT_TOKENS)

    def _brief(self, client: Client) -> None:
        """A version that may go at any moment."""
        if self._tenant.brief:
            digest = self._draw.choice(self._tenant.brief)
            self._listen(client, BRIEF, digest, self._draw.choice((0, CHAT)), CHAT_TOKENS)

    def _newcomer(self, client: Client) -> None:
        """A connection for one question."""
        with self._tenant.client(self._draw.randrange(len(self._tenant.addresses))) as own:
            self._ask(own)

    def _listen(
        self, client: Client, name: str, digest: str, number: int, wanted: int, whole: bool = False
    ) -> None:
        answer = self._tenant.answer(name, digest, number, wanted)
        prompt = CONVERSATION if number == CHAT else QUESTIONS[number].prompt
        options = {**LOOSE, **({} if number == CHAT else QUESTIONS[number].options), "max_new_tokens": wanted}
        adapter = f"{name}@{digest}" if digest else name or None
        try:
            if whole:
                answer.take_whole(client.generate(prompt, adapter=adapter, **options))
            else:
                for chunk in client.stream(prompt, adapter=adapter, **options):
                    answer.take(chunk)
            answer.end()
        except LoraFleetError as error:
            answer.fail(error)

    def _deaf(self, client: Client) -> None:
        """It reads one token, and then nothing for so long that it is cut off."""
        asked_at = time.monotonic()
        try:
            with closing(
                client.stream(
                    QUESTIONS[0].prompt, max_new_tokens=DEAF_TOKENS, logprobs=20, prompt_logprobs=20, **LOOSE
                )
            ) as stream:
                next(stream)
                self._tenant.stops.wait(self._deaf_s)
                for _ in stream:
                    """What was sent until then."""
        except LoraFleetError as error:
            if name_of(error) == "CANCELLED SLOW_CLIENT":
                self._tenant.causes.expect("a client that does not read")
            else:
                self._tenant.judge(error, asked_at, "", OF_ANSWERS)

    def rush(self, count: int) -> None:
        """So many connections that are closed, and as many that break: one left of each could not hide."""
        for _ in range(count):
            with self._tenant.client(0) as own:
                own.tokenize("so many")
                self._vanish(own)

    def _vanish(self, client: Client) -> None:
        """The connection breaks in the middle of a stream, without a word of HTTP/2."""
        prompt = inference_pb2.TokenIds(ids=QUESTIONS[0].prompt)
        stopping = common_pb2.Stopping(max_new_tokens=400, ignore_eos=True)
        body = inference_pb2.GenerateRequest(token_ids=prompt, stopping=stopping).SerializeToString()
        with suppress(OSError):  # A scheduler that restarts takes no connection.
            connection = http2.Connection(self._draw.choice(self._tenant.addresses), reads=False)
            try:
                stream, head = connection.call(STREAM, [("authorization", f"Bearer {self._tenant.token}")])
                connection.send([head, http2.message(stream, body)])
                self._tenant.stops.wait(self._draw.uniform(0, self._pause_s))
            finally:
                connection.close()

    def _look(self, client: Client) -> None:
        """At what there is."""
        asked_at = time.monotonic()
        look = self._draw.choice((client.models, client.fleet, lambda: client.tokenize("so many tokens")))
        try:
            look()
        except LoraFleetError as error:
            self._tenant.judge(error, asked_at, "", OF_ASKING)

    def _refused(self, client: Client) -> None:
        """What is wrong with it, it must be told, and nothing else."""
        asked_at = time.monotonic()
        what, wanted, call = self._draw.choice(self._wrong(client))
        try:
            call()
            self._tenant.problems.append(f"{what} was not refused")
        except LoraFleetError as error:
            if name_of(error) == wanted:
                self._tenant.causes.expect(what)
            else:
                self._tenant.judge(error, asked_at, what, OF_ASKING)

    def _wrong(self, client: Client) -> list[tuple[str, str, Callable[[], object]]]:
        number = self._draw.randrange(len(self._tenant.addresses))
        return [
            (
                "a temperature below 0",
                "INVALID_ARGUMENT INVALID_REQUEST",
                lambda: client.generate([5, 6], temperature=-1),
            ),
            (
                "a prompt of too many tokens",
                "INVALID_ARGUMENT INVALID_REQUEST",
                lambda: client.generate([5] * 9000),
            ),
            (
                "another tenant's adapter",
                "NOT_FOUND ADAPTER_NOT_FOUND",
                lambda: client.generate([5, 6], adapter=f"somebody/{BRIEF}"),
            ),
            (
                "a chat without a role",
                "INVALID_ARGUMENT INVALID_REQUEST",
                lambda: client.generate([{"role": "", "content": "x"}]),
            ),
            ("an unknown token", "UNAUTHENTICATED UNAUTHENTICATED", lambda: self._as(number, "nobody's")),
        ]

    def _as(self, number: int, token: str) -> None:
        with self._tenant.client(number, token) as stranger:
            stranger.generate([5, 6])
