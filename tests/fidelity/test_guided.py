"""Answers held to constraints are those of transformers + PEFT behind the same masks."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLTokenizer
from transformers import LogitsProcessor, StoppingCriteria

import lorafleet.demo
from adapter_store import DiskStore, ModelSpec
from executor.batch.sampling import SamplingParams
from executor.batch.sequence import Dispatch, StopRules
from kernels.reference.gumbel_draw import gumbel_draw
from lorafleet.constraints.constraint import Constraint
from lorafleet.constraints.grammar import matcher_of
from lorafleet.constraints.tokens import guide_tokenizer, read_tokenizer
from lorafleet.demo.model import default_cache, prepare_model
from tests.fidelity.conftest import Stream
from tests.fidelity.families import make_family
from tests.support.adapters.oracle import Oracle
from tests.support.adapters.peft import DENSE, TABLES
from tests.support.engines.driver import Driver, greedy, make_driver
from tests.support.engines.guided import CONSTRAINTS

NUM_TOKENS = 24
DEMO = Path(lorafleet.demo.__file__).parent


@dataclass
class Truth(LogitsProcessor):
    """One answer's masks and noise, from the text so far. Greedy decoding behind it draws what it says."""

    guide: LLTokenizer
    dispatch: Dispatch

    def __post_init__(self) -> None:
        wanted = self.dispatch.constraint
        self.matcher = matcher_of(self.guide, wanted) if wanted else None
        self.known = len(self.dispatch.prompt_token_ids)

    def follow(self, input_ids: torch.Tensor) -> None:
        if self.matcher and (new := input_ids[0, self.known :].tolist()):
            assert self.matcher.consume_tokens(new), self.matcher.get_error()
        self.known = input_ids.shape[1]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.follow(input_ids)
        scores = scores.float().clone()
        if self.matcher:
            words = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(words, bitorder="little")[: scores.shape[1]]
            scores[0, torch.from_numpy(allowed == 0)] = -torch.inf
        if self.dispatch.sampling.temperature == 0:
            return scores
        drawn = gumbel_draw(
            scores,
            scores.amax(-1),
            torch.tensor([self.dispatch.sampling.temperature], dtype=torch.float64),
            torch.tensor([self.dispatch.sampling.seed]),
            torch.tensor([self.known]),
            None,
        )
        return torch.full_like(scores, -torch.inf).index_fill_(1, drawn, 0.0)


@dataclass
class Whole(StoppingCriteria):
    """Nothing may follow."""

    truth: Truth

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.truth.follow(input_ids)
        return torch.tensor([self.truth.matcher is not None and self.truth.matcher.is_stopped()])


def dispatches_of(streams: Sequence[Stream], digests: Sequence[str]) -> list[Dispatch]:
    """Greedy and drawn ones, in turn held to a constraint and to none."""
    kinds: list[Constraint | None] = [None, *CONSTRAINTS.values()]
    return [
        replace(
            greedy(stream.name, stream.prompt, digest=digest, constraint=kinds[number % len(kinds)]),
            stop=StopRules(max_new_tokens=NUM_TOKENS),
            sampling=SamplingParams(temperature=1.0, seed=number)
            if number % 2
            else SamplingParams(temperature=0),
        )
        for number, (stream, digest) in enumerate(zip(streams, digests, strict=True))
    ]


@contextmanager
def answered(
    model: Path, streams: Sequence[Stream], folder: Path, **settings: object
) -> Iterator[tuple[Driver, list[Dispatch]]]:
    """By an engine with two slots, at once."""
    store, spec = DiskStore(folder), ModelSpec.from_folder(model)
    digests = [
        store.put(stream.adapter, "default", stream.name, spec).digest if stream.adapter else ""
        for stream in streams
    ]
    driver = make_driver(str(model), store, store=str(folder), torch_threads=1, max_loras=2, **settings)
    with closing(driver.engine):
        dispatches = dispatches_of(streams, digests)
        driver.run(*dispatches)
        yield driver, dispatches


def assert_equal_oracle(
    driver: Driver, model: Path, streams: Sequence[Stream], asked: list[Dispatch]
) -> None:
    oracle, spec = Oracle(model), ModelSpec.from_folder(model)
    end = oracle.base.config.eos_token_id
    guide, tokenizer = guide_tokenizer(model, spec.vocab_size, [end]), read_tokenizer(model)
    for stream, dispatch in zip(streams, asked, strict=True):
        truth, prompt = Truth(guide, dispatch), torch.tensor([stream.prompt])
        found = oracle.with_adapter(stream.adapter).generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=end,
            logits_processor=[truth],
            stopping_criteria=[Whole(truth)],
        )
        answer = found[0, len(stream.prompt) :].tolist()
        assert driver.token_ids(dispatch.key) == answer, (stream.name, tokenizer.decode(answer))


@pytest.mark.parametrize(("family", "size"), [("qwen2", 1), ("mistral", 1), ("llama", 1), ("qwen3", 2)])
def test_family_equals_peft_behind_the_same_masks(family: str, size: int, tmp_path: Path) -> None:
    """Two ranks do not serve DoRA."""
    model, every = make_family(family, tmp_path)
    streams = [stream for stream in every if size == 1 or not stream.name.startswith("dora")]
    settings = {"tensor_parallel_size": size, "lora_modules": (*DENSE, *TABLES)}
    few = {"block_size": 4, "num_kv_blocks": 40}
    with answered(model, streams, tmp_path / "store", **settings, **few) as (driver, asked):
        assert_equal_oracle(driver, model, streams, asked)
        assert driver.metric("preemptions_total") > 0
        assert driver.metric("page_ins_total") >= len(streams) - 1


def test_smollm2_equals_peft_behind_the_same_masks(tmp_path: Path) -> None:
    model = prepare_model(default_cache(), lambda stage, share: None)
    tokenizer = read_tokenizer(model)
    prompts = json.loads((DEMO / "prompts.json").read_text())
    shipped = ("", "json", "json", "pirate")
    asked = ("Describe a lighthouse.", *prompts["json"][:2], prompts["pirate"][0])
    streams = [
        Stream(f"{number}", DEMO / "adapters" / name if name else None, tuple(tokenizer.encode(text).ids))
        for number, (name, text) in enumerate(zip(shipped, asked, strict=True))
    ]
    with answered(model, streams, tmp_path / "store") as (driver, dispatches):
        assert_equal_oracle(driver, model, streams, dispatches)
