"""Answers that fit, from real services: schemas, grammars and words, by the client and by the command."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapter_store import ModelSpec
from adapter_store.base.end_tokens import read_end_tokens
from lorafleet import AsyncClient, Client, Constraint, FinishReason, InvalidRequest, cli
from lorafleet.constraints.tokens import guide_tokenizer
from tests.support.constrained.asking import Asker, Tally, fits
from tests.support.constrained.schemas import drawn
from tests.support.services.cluster import Cluster, Pair

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(one: Pair) -> Iterator[Client]:
    with Client(one.scheduler.address, timeout=60) as client:
        yield client


def test_answers_fit_the_schemas_of_a_short_form_of_make_constraints(cluster: Cluster, one: Pair) -> None:
    model = cluster.model
    guide = guide_tokenizer(model, ModelSpec.from_folder(model).vocab_size, read_end_tokens(model))

    async def ask() -> Tally:
        async with AsyncClient(one.scheduler.address, timeout=60) as client:
            return await Asker(client, guide, [None], 24).ask(drawn(40, 7))

    tally = asyncio.run(ask())
    assert not tally.wrong and not tally.failed
    assert tally.valid and tally.cut == tally.prefixes
    assert tally.refused.keys() >= {"not"}


KINDS = [
    (Constraint.regex("[ab]{3}c"), "[ab]{3}c"),
    (Constraint.lark('start: "x" ("y" | "z")'), "x[yz]"),
    (Constraint.choice("yes", "no, never"), "yes|no, never"),
    (Constraint.json_object(), r"\{[\s\S]*\}"),
]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "seed": 3}, {"logit_bias": {0: 100.0, 9: 100.0}}], ids=str
)
def test_every_kind_holds(client: Client, options: dict[str, Any]) -> None:
    for constraint, pattern in KINDS:
        answer = client.generate("x", constraint=constraint, max_new_tokens=100, **options)
        if answer.finish_reason is FinishReason.STOP:
            assert re.fullmatch(pattern, answer.text), answer.text
        else:
            assert constraint == Constraint.json_object(), "only that may go on for so long"
    cut = client.generate("x", constraint=Constraint.regex("[ab]{99}"), max_new_tokens=5, **options)
    assert (cut.finish_reason, len(cut.token_ids)) == (FinishReason.LENGTH, 5)
    assert set(cut.text) <= set("ab")


def test_least_tokens_delay_an_end_only_where_the_text_can_go_on(client: Client) -> None:
    loose = client.generate("x", constraint=Constraint.regex("a+"), min_new_tokens=9, max_new_tokens=12)
    assert len(loose.token_ids) >= 9 and set(loose.text) == {"a"}
    fixed = client.generate("x", constraint=Constraint.choice("ab"), min_new_tokens=9, max_new_tokens=12)
    assert (fixed.text, fixed.finish_reason) == ("ab", FinishReason.STOP)


def test_what_cannot_be_held_to_is_refused_by_its_path_and_costs_nothing(client: Client, one: Pair) -> None:
    before = one.scheduler.count("dispatches")
    schema = Constraint.json_schema({"properties": {"a": {"not": {}}}})
    for options, field in (
        ({"constraint": schema}, "constraint.json_schema/properties/a"),
        ({"constraint": Constraint.regex("a(?=b)")}, "constraint.regex"),
        ({"constraint": Constraint.json_object(), "ignore_eos": True}, "stopping.ignore_eos"),
        ({"allowed_token_ids": [5, 448]}, "allowed_token_ids[1]"),
        ({"bad_words": [""]}, "bad_words[0]"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            client.generate("x", max_new_tokens=3, **options)
        assert [each.field for each in caught.value.violations] == [field]
    assert one.scheduler.count("dispatches") == before


def test_allowed_tokens_and_bad_words(client: Client) -> None:
    free = client.generate("x", max_new_tokens=8)
    allowed = client.generate("x", max_new_tokens=8, allowed_token_ids=[40, 41])
    assert len(allowed.token_ids) == 8 and set(allowed.token_ids) <= {40, 41}
    word = free.text[:1]
    held = client.generate("x", max_new_tokens=8, bad_words=[word])
    assert held.text[:1] != word


def test_the_command_takes_each_kind(one: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema, grammar = tmp_path / "person.json", tmp_path / "x.lark"
    schema.write_text(json.dumps(PERSON))
    grammar.write_text('start: "x" | "xyz"')

    def generate(*flags: str) -> str:
        words = ["generate", "x", "--max-new-tokens", "400", "--target", one.scheduler.address, *flags]
        assert cli.main(words) == 0
        return capsys.readouterr().out.removesuffix("\n")

    assert fits(PERSON, generate("--json-schema", str(schema)))
    assert generate("--choice", "red", "--choice", "blue") in ("red", "blue")
    assert generate("--regex", "a{2}b") == "aab"
    assert generate("--lark", str(grammar)) in ("x", "xyz")
    assert generate("--json-object").startswith("{")


def test_the_command_names_what_is_wrong(
    one: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = tmp_path / "bad.json"
    schema.write_text('{"items": {"uniqueItems": true}}')
    assert cli.main(["generate", "x", "--target", one.scheduler.address, "--json-schema", str(schema)]) == 1
    assert "constraint.json_schema/items: answers cannot be held to uniqueItems" in capsys.readouterr().err
