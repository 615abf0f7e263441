"""Dispatches whose answers are guided, on a tiny base with a byte-level tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from executor.batch.sampling import SamplingParams
from executor.batch.sequence import Dispatch, StopRules
from lorafleet.constraints.constraint import Constraint
from lorafleet.constraints.grammar import matcher_of
from lorafleet.constraints.tokens import guide_tokenizer
from tests.support.adapters.peft import make_base
from tests.support.adapters.tokenizers import byte_level, write_folder
from tests.support.engines.driver import greedy

VOCABULARY, EOS = 448, 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "at": {
            "type": "object",
            "properties": {
                "lat": {"type": "integer", "minimum": 0, "maximum": 90},
                "ok": {"type": "boolean"},
            },
            "required": ["lat", "ok"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "at"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "schema": Constraint.json_schema(SCHEMA),
    "object": Constraint.json_object(),
    "regex": Constraint.regex("[a-f]{3,5}(-[0-9]{2}){2}"),
    "choice": Constraint.choice("the quick fox", "the lazy dog", "你好"),
    "lark": Constraint.lark('start: "(" (start | NUMBER)* ")"\nNUMBER: /[0-9]{1,3} /'),
}


def make_guided_base(folder: Path) -> Path:
    """Its tokenizer has fewer tokens than the model: what is above may never come."""
    return write_folder(make_base(folder, vocab_size=VOCABULARY, std=0.15), byte_level())


def guided(
    name: str, constraint: Constraint | None, prompt: Sequence[int] = range(40, 60), **fields: Any
) -> Dispatch:
    """Greedy, and ends by itself. `fields` are Dispatch's."""
    stop = fields.pop("stop", StopRules(max_new_tokens=fields.pop("max_new_tokens", 40)))
    return greedy(name, prompt, constraint=constraint, stop=stop, **fields)


def mixed(digests: Sequence[str]) -> list[Dispatch]:
    """Guided in every way and not at all, greedy and drawn, over base and adapters."""
    made = []
    for number, (name, constraint) in enumerate([*CONSTRAINTS.items()] * 2):
        drawn = SamplingParams(temperature=1.5, seed=number, frequency_penalty=0.5)
        sampling = drawn if number >= len(CONSTRAINTS) else SamplingParams(temperature=0, logprobs=1)
        prompt = range(20 + 5 * number, 20 + 5 * number + (5, 20, 33)[number % 3])
        digest = ["", *digests][number % (1 + len(digests))]
        made.append(guided(f"{name}{number}", constraint, prompt, digest=digest, sampling=sampling))
    made.append(greedy("free", range(60, 90), max_new_tokens=30))
    made.append(greedy("allowed", range(5, 30), allowed_token_ids=tuple(range(100, 120))))
    made.append(greedy("bad", range(5, 30), digest=digests[0], bad_words=((7,), (300, 301), (1, 2, 3))))
    return made


def accepts(base: Path, constraint: Constraint, token_ids: Sequence[int]) -> bool:
    """Whether a matcher that has seen nothing takes them all, one after another."""
    matcher = matcher_of(guide_tokenizer(base, VOCABULARY, [EOS]), constraint)
    return matcher.validate_tokens(list(token_ids)) == len(token_ids)
