"""A tenant of a soaked fleet: its names, what it knows of right answers, and how its calls are judged."""

import itertools
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorafleet import Client, LoraFleetError
from tests.support.adapters.tokenizers import CHAT_TEMPLATE
from tests.support.chaos.run import QUESTIONS, World, know
from tests.support.chaos.traffic import Answer
from tests.support.services.streams import LOOSE
from tests.support.soak.causes import Cause, Causes, name_of

STEADY = ("steady-1", "steady-2")  # Their versions stay, and only their aliases move.
BRIEF = "brief"  # Its versions come and go.
CHAT = len(QUESTIONS)  # The number of the one question that is a conversation.
CONVERSATION = [{"role": "user", "content": "Who goes there?"}]
CHAT_TOKENS = 24
# What a request for an answer may feel. A scheduler or an executor that goes is none of it: its client takes
# the answer up again.
OF_ANSWERS = (Cause.STORE_AWAY, Cause.WITHDRAWN, Cause.REMOVED)


OF_QUOTAS = ("REQUEST_RATE", "PROMPT_TOKEN_RATE", "OUTPUT_TOKEN_RATE", "TOO_MANY_STREAMS")


@dataclass
class Tenant(World):
    """`is_limited`: it has a quota that it asks for more than."""

    causes: Causes = field(default_factory=Causes)
    tenant: str = ""
    token: str = ""
    is_limited: bool = False
    stops: threading.Event = field(default_factory=threading.Event)
    brief: list[str] = field(default_factory=list)  # Digests that are to be had, as far as is known.

    @property
    def goes_on(self) -> bool:
        return not self.stops.is_set() and time.monotonic() < self.ends_at

    def clients(self) -> list[Client]:
        """Each knows all schedulers, and begins with another one."""
        return [self.client(number) for number in range(len(self.addresses))]

    def client(self, first: int, token: str = "", timeout: float | None = None) -> Client:
        addresses = [*self.addresses[first:], *self.addresses[:first]]
        return Client(f"ipv4:{','.join(addresses)}", token=token or self.token, timeout=timeout)

    def failed(self, error: LoraFleetError, ref: str, asked_at: float, options: Mapping[str, Any]) -> None:
        named = name_of(error)
        if ref.partition("@")[0] == "nobody" and named == "NOT_FOUND ADAPTER_NOT_FOUND":
            self.causes.expect("an unknown adapter")
        elif "timeout" in options and error.code.name == "DEADLINE_EXCEEDED":
            self.causes.expect("a deadline of its own")
        else:
            # Who has no time to wait is told so in place of being taken to another scheduler.
            hasty = (Cause.SCHEDULER_AWAY,) if "timeout" in options else ()
            self.judge(error, asked_at, ref, OF_ANSWERS + hasty)

    def judge(self, error: LoraFleetError, asked_at: float, about: str, may_be: tuple[Cause, ...]) -> None:
        if self.is_limited and error.reason in OF_QUOTAS:
            self.causes.expect(f"its own quota: {error.reason}")
        else:
            self.causes.judge(error, asked_at, about, may_be)

    def learn(self, client: Client, folders: Sequence[Path]) -> None:
        """Asks a quiet fleet for all answers."""
        self.digests, truth = know(client, folders)
        self.truth = dict(truth) | {
            (digest, CHAT): client.generate(
                CONVERSATION,
                adapter=f"known@{digest}" if digest else None,
                max_new_tokens=CHAT_TOKENS,
                **LOOSE,
            ).token_ids
            for digest in ("", *self.digests)
        }

    def push(self, client: Client) -> None:
        """All adapters under each steady name."""
        for name, (digest, folder) in itertools.product(self.names, self.digests.items()):
            self.aliases.changing(name, digest)
            client.adapters.push(folder, name)
            self.aliases.changed(name, digest)

    def learn_variant(self, variant: str, original: str) -> None:
        """Copies, as answers in the making look things up meanwhile."""
        alike = {(variant, number): self.truth[original, number] for number in range(CHAT + 1)}
        self.truth = {**self.truth, **alike}

    def answer(self, name: str, digest: str, number: int, wanted: int) -> Answer:
        return Answer(self, name, digest, number, wanted, {})


def write_variant(original: Path, folder: Path, number: int) -> Path:
    """Another version with the same answers: the chat template is a part of what a version is."""
    shutil.copytree(original, folder)
    (folder / "chat_template.jinja").write_text(f"{{# {number} #}}{CHAT_TEMPLATE}")
    return folder
