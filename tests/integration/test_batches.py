"""Mixed batches through the whole fleet, against transformers + PEFT alone, one request at a time."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lorafleet import Client
from lorafleet.v1 import common_pb2, inference_pb2
from tests.support.adapters.oracle import Oracle
from tests.support.adapters.peft import ATTENTION, DENSE, MLP
from tests.support.services.cluster import Cluster, Pair
from tests.support.services.failures import raw_stubs

RANKS = (1, 2, 3, 5, 8, 12, 16, 24, 48, 64)
NUM_TOKENS = 12
NEAR_TIE = 1e-3
TARGETS = (DENSE, ATTENTION, MLP, ("q_proj", "k_proj"), ("v_proj", "down_proj"))
ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    f"rank{rank}": {"rank": rank, "targets": TARGETS[n % 5], "std": 0.3 / rank**0.25, "alpha": 2 * rank**0.5}
    for n, rank in enumerate(RANKS)
} | {f"head{n}": {"rank": 4, "targets": ["lm_head", "v_proj"][: 1 + n % 2], "std": 0.3} for n in range(4)}
Row = tuple[str, int]  # adapter ("" is the base) and the prompt's length


@dataclass
class Truth:
    """The oracle's greedy answers, each made once."""

    oracle: Oracle
    folder: Callable[..., Path]
    known: dict[tuple[str, tuple[int, ...]], list[int] | None] = field(default_factory=dict)

    def of(self, name: str, prompt: tuple[int, ...]) -> list[int] | None:
        """None when a near tie lets summation order choose."""
        if (name, prompt) not in self.known:
            adapter = self.folder(name, **ADAPTERS[name]) if name else None
            run = self.oracle.greedy(adapter, list(prompt), NUM_TOKENS)
            self.known[name, prompt] = run.tokens if min(run.gaps) > NEAR_TIE else None
        return self.known[name, prompt]


@pytest.fixture(scope="module")
def truth(cluster: Cluster, adapter: Callable[..., Path]) -> Truth:
    return Truth(Oracle(cluster.model), adapter)


@pytest.fixture(scope="module")
def client(wide: Pair, adapter: Callable[..., Path]) -> Iterator[Client]:
    with wide.client() as client:
        for name, fields in ADAPTERS.items():
            client.adapters.push(adapter(name, **fields), name)
        yield client
    wide.wait_idle()


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(1000 * length + seed)
    return tuple(draw.randrange(3, 440) for _ in range(length))


def ask(wide: Pair, rows: Sequence[tuple[str, tuple[int, ...]]], scored: Sequence[int] = ()) -> list[Any]:
    """All at once, in this order; logprobs of prompt and answer for the rows that are to be scored."""
    with_scores = inference_pb2.ResponseOptions(prompt_logprobs=0, logprobs=0)
    requests = [
        inference_pb2.GenerateRequest(
            adapter=name or None,
            token_ids=inference_pb2.TokenIds(ids=tokens),
            stopping=common_pb2.Stopping(max_new_tokens=NUM_TOKENS, ignore_eos=True),
            response=with_scores if number in scored else None,
        )
        for number, (name, tokens) in enumerate(rows)
    ]
    with raw_stubs(wide.scheduler.address) as stubs:
        calls = [stubs.inference.Generate.future(request) for request in requests]
        return [call.result() for call in calls]


def equal(wide: Pair, truth: Truth, rows: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    compared = 0
    for row, answer in zip(rows, ask(wide, rows), strict=True):
        expected = truth.of(*row)
        if expected is not None:
            assert list(answer.token_ids) == expected, row
            compared += 1
    assert compared >= 0.7 * len(rows), "too many near ties to prove anything"


@pytest.mark.usefixtures("client")
def test_all_ranks_in_one_batch(wide: Pair, truth: Truth) -> None:
    rows = [(f"rank{rank}", prompt(9 + n)) for n, rank in enumerate(RANKS)]
    equal(wide, truth, [("", prompt(9)), *rows, ("", prompt(12))])


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("order", ["-A", "A-", "A-B-", "AB", "--", "AABA", "ABAB", "ABBA", "AAAB", "A-B-A"])
def test_orders_of_rows(wide: Pair, truth: Truth, order: str) -> None:
    names = {"A": "rank8", "B": "rank3", "-": ""}
    equal(wide, truth, [(names[c], prompt((1, 7, 16, 33)[n % 4])) for n, c in enumerate(order)])


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("seed", range(3))
def test_random_orders(wide: Pair, truth: Truth, seed: int) -> None:
    draw = random.Random(seed)
    names = ["", *(f"rank{rank}" for rank in (1, 5, 16, 24, 64)), "head1"]
    equal(
        wide,
        truth,
        [(draw.choice(names), prompt(draw.choice((1, 7, 16, 33)), draw.randrange(2))) for _ in range(32)],
    )


@pytest.mark.usefixtures("client")
def test_steps_without_rows_of_an_adapter(wide: Pair, truth: Truth) -> None:
    """An adapter that is resident without a row, one whose last row just ended, an idle fleet, and a prompt
    that is wholly in the prefix cache."""
    whole = prompt(48)
    equal(wide, truth, [("rank8", prompt(7)), ("rank3", whole), ("", whole)])
    equal(wide, truth, [("", prompt(7))])
    equal(wide, truth, [("rank3", prompt(16))])
    for name in ("rank3", "", "rank3"):
        (answer,) = ask(wide, [(name, whole)])
        assert answer.usage.cached_prompt_tokens >= 32
        assert truth.of(name, whole) in (None, list(answer.token_ids))


def test_prompts_are_scored_with_their_own_head(client: Client, wide: Pair, truth: Truth) -> None:
    """1025 tokens: a chunk of 1024 and one more; four heads in one batch, two of them score the prompt."""
    rows = [(f"head{n}", prompt(1025, n)) for n in range(4)]
    answers = ask(wide, [*rows, ("", rows[0][1])], scored=(0, 2))
    unscored = ask(wide, [*rows, ("", rows[0][1])])
    assert [list(a.token_ids) for a in answers] == [list(a.token_ids) for a in unscored]
    assert [len(answer.prompt_logprobs) for answer in answers] == [1025, 0, 1025, 0, 0]
    for number in (0, 2):
        (name, tokens), answer = rows[number], answers[number]
        model = truth.oracle.with_adapter(truth.folder(name, **ADAPTERS[name]))
        with torch.inference_mode():
            scores = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = [float(scores[n, token]) for n, token in enumerate(tokens[1:])]
        first, *rest = answer.prompt_logprobs
        assert not first.HasField("chosen")
        assert [p.chosen.token_id for p in rest] == list(tokens[1:])
        assert [p.chosen.logprob for p in rest] == pytest.approx(expected, abs=1e-4)
        # What was generated scores the same as a prompt.
        again = client.generate(
            [*tokens, *answer.token_ids], adapter=name, max_new_tokens=1, prompt_logprobs=0
        )
        scored = [p.chosen.logprob for p in again.prompt_logprobs[-NUM_TOKENS:] if p.chosen]
        assert scored == pytest.approx([p.chosen.logprob for p in answer.logprobs], abs=1e-4)


def test_prefixes_are_cached_within_one_adapter_and_salt(client: Client, wide: Pair, truth: Truth) -> None:
    whole = prompt(48, 5)
    part = (*whole[:20], *prompt(28, 6))

    def cached(name: str, tokens: tuple[int, ...], **options: Any) -> int:
        answer = client.generate(
            tokens, adapter=name or None, max_new_tokens=NUM_TOKENS, ignore_eos=True, **options
        )
        assert truth.of(name, tokens) in (None, list(answer.token_ids))
        return answer.usage.cached_prompt_tokens

    a, b, c = "rank16", "rank8", "rank2"
    assert [cached(name, whole) for name in ("", a, b)] == [0, 0, 0]
    assert all(cached(name, whole) >= 32 for name in (a, ""))
    equal(wide, truth, [("", whole), (a, whole), (b, whole), (a, whole), ("", whole)])
    assert cached(a, part) == 16
    assert cached(c, part) == 0
    assert cached(a, whole, cache_salt="mine") == 0
    assert cached(a, whole, cache_salt="mine") >= 32
