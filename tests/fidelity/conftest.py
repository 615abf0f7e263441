"""Fidelity: what the services answer equals what transformers + PEFT answer alone."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from lorafleet import Client, Generation
from tests.support.adapters.oracle import Oracle, OracleRun
from tests.support.engines.ranks import copy_ranks

NUM_TOKENS = 32
# Where the executor runs: flags for the float32 that is compared, on the CPU and on a GPU.
DEVICES = [
    pytest.param((), id="cpu"),
    pytest.param(
        (
            "--device",
            "cuda",
            "--dtype",
            "float32",
            "--max-seats",
            "16",
            "--max-batched-tokens",
            "512",
            "--compile-processes",
            "4",
        ),
        id="cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
# Below this gap between the two best logits, summation order alone may choose the other token.
NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Stream:
    """One request: its prompt, its adapter (None: the base model) under the name it was pushed as."""

    name: str
    adapter: Path | None
    prompt: tuple[int, ...]


Expected = dict[str, OracleRun]


@pytest.fixture(scope="session", autouse=True)
def quick_ranks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        copy_ranks(monkeypatch)
        yield


@pytest.fixture(scope="session")
def expect() -> Callable[[Path, Sequence[Stream]], Expected]:
    """The oracle's answers by stream name, each computed once; fails if a committed prompt comes near a tie.

    `guesses` of them, in the order of the streams, only save time: see the oracle's `greedy`."""
    known: dict[tuple[Path, Stream], OracleRun] = {}

    def run(model: Path, streams: Sequence[Stream], guesses: Sequence[Sequence[int]] = ()) -> Expected:
        oracle = None
        for s, guess in zip_longest(streams, guesses, fillvalue=()):
            if (model, s) not in known:
                oracle = oracle or Oracle(model)
                known[model, s] = oracle.greedy(s.adapter, list(s.prompt), NUM_TOKENS, guess)
        expected = {stream.name: known[model, stream] for stream in streams}
        ties = {name: min(run.gaps) for name, run in expected.items() if min(run.gaps) <= NEAR_TIE}
        assert not ties, f"choose other prompts or seeds for these: {ties}"
        answers = [tuple(run.tokens) for run in expected.values()]
        assert len(set(answers)) == len(answers), "two streams have one answer: an adapter is not loud"
        return expected

    return run


@pytest.fixture(scope="session")
def ask() -> Callable[..., list[Generation]]:
    """Send streams through a scheduler, at once or one by one, and return the answers in their order."""

    def run(target: str, streams: Sequence[Stream], *, at_once: bool = True) -> list[Generation]:
        with Client(target) as client, ThreadPoolExecutor(len(streams) if at_once else 1) as pool:

            def one(stream: Stream) -> Generation:
                return client.generate(
                    stream.prompt,
                    adapter=stream.name if stream.adapter else None,
                    max_new_tokens=NUM_TOKENS,
                    ignore_eos=True,
                    logprobs=0,
                    timeout=240,
                )

            return list(pool.map(one, streams))

    return run


@pytest.fixture(scope="session")
def assert_equal() -> Callable[[Sequence[Stream], Sequence[Generation], Expected], None]:
    def check(streams: Sequence[Stream], answers: Sequence[Generation], expected: Expected) -> None:
        for stream, answer in zip(streams, answers, strict=True):
            truth = expected[stream.name]
            assert list(answer.token_ids) == truth.tokens, stream.name
            got = [position.chosen.logprob for position in answer.logprobs if position.chosen]
            assert got == pytest.approx(truth.logprobs, abs=1e-4), stream.name

    return check
