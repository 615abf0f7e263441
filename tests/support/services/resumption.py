"""Streams of every kind, and whether a disturbance changed one of them."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorafleet import Client
from tests.support.services.streams import Watched, undisturbed, watch

NUM_TOKENS = 600
PROMPT = [30, 41, 52, 63, 74] * 4
SAMPLED: Mapping[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.95,
    "top_k": 50,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
    "seed": 17,
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "base": {},
    "adapter": {"adapter": "held"},
    "sampled": {"adapter": "held", **SAMPLED},
}


@dataclass(frozen=True)
class Expected:
    tokens: tuple[int, ...]
    text: str
    digest: str


def prepare(client: Client, adapter: Path) -> dict[str, Expected]:
    """Pushes the adapter and asks for the answers of an undisturbed fleet, all at once."""
    client.adapters.push(adapter, "held")

    def ask(options: Mapping[str, Any]) -> Expected:
        if "seed" in options:
            a = client.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True, **options)
        else:
            a = undisturbed(client, PROMPT, NUM_TOKENS, **options)
        return Expected(a.token_ids, a.text, a.adapter_digest)

    with ThreadPoolExecutor(len(KINDS)) as pool:
        found = dict(zip(KINDS, pool.map(ask, KINDS.values()), strict=True))
    assert len({answer.tokens for answer in found.values()}) == len(found)
    return found


def start(client: Client, copies: int = 1) -> list[tuple[str, Watched]]:
    """All kinds of streams, each with a few tokens already."""
    kinds = [kind for kind in KINDS for _ in range(copies)]
    streams = [(kind, watch(client, PROMPT, NUM_TOKENS, **KINDS[kind])) for kind in kinds]
    for _, stream in streams:
        stream.wait_for(5)
    return streams


def in_the_middle(streams: Sequence[tuple[str, Watched]]) -> None:
    """Some may have ended by now; a disturbance that comes after the end of all proves nothing."""
    assert any(len(stream.tokens) < NUM_TOKENS for _, stream in streams), "too late: make the answers longer"


def all_go_on(streams: Sequence[tuple[str, Watched]], counts: Sequence[int]) -> None:
    """Returns when each has more tokens than `counts`, or all."""
    for (_, stream), count in zip(streams, counts, strict=True):
        stream.wait_for(min(count + 1, NUM_TOKENS))


def check(streams: Sequence[tuple[str, Watched]], expected: Mapping[str, Expected]) -> None:
    """Waits for the ends: no token is missing, repeated or another one."""
    for kind, stream in streams:
        stream.wait_end()
        assert stream.error is None, (kind, stream.error)
        found = Expected(tuple(stream.tokens), stream.text, stream.digest)
        assert found == expected[kind], kind
