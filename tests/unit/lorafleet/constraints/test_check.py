"""What llguidance makes of constraints, over a real tokenizer: what is taken, and what is named where."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from lorafleet.constraints.check import check
from lorafleet.constraints.constraint import Constraint
from lorafleet.constraints.grammar import InvalidConstraint, grammar_of, matcher_of
from lorafleet.constraints.tokens import InvalidTokenizer, guide_tokenizer
from tests.support.adapters.tokenizers import byte_fallback, byte_level, write_folder

KEYWORDS = st.sampled_from(
    [
        "type",
        "properties",
        "items",
        "required",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "not",
        "$ref",
        "$defs",
        "pattern",
        "format",
        "minLength",
        "maxItems",
        "minimum",
        "multipleOf",
        "additionalProperties",
        "patternProperties",
        "prefixItems",
        "x-guidance",
    ]
)
VOCAB_SIZE, END = 448, 0
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ALL = [
    Constraint.json_schema(PERSON),
    Constraint.json_object(),
    Constraint.regex(r"[a-c]+\d{2}"),
    Constraint.lark('start: "a" b*\nb: "b" | "c"'),
    Constraint.choice("yes", 'no\n"/é', "你好"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tokens"), byte_level())


@pytest.fixture(scope="module")
def guide(folder: Path) -> LLTokenizer:
    return guide_tokenizer(folder, VOCAB_SIZE, [END])


def takes(matcher: LLMatcher, guide: LLTokenizer, text: str) -> bool:
    """Whether the text is whole."""
    assert matcher.reset()
    tokens = guide.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("constraint", ALL, ids=lambda each: each.kind)
def test_every_kind_crosses_the_wire_and_has_one_grammar(constraint: Constraint, guide: LLTokenizer) -> None:
    again = Constraint.from_proto(constraint.to_proto())
    assert again == constraint
    assert grammar_of(again) == grammar_of(constraint)
    check(guide, constraint)


def test_a_message_of_no_known_kind_is_none() -> None:
    assert Constraint.from_proto(type(ALL[0].to_proto())()) is None


def test_texts_are_taken_that_fit_and_no_others(guide: LLTokenizer) -> None:
    good = {
        0: ['{"name":"x","age":3}', '{ "name" : "x",\n  "age":0 }'],
        1: ["{}", '{"a":[1,null]}'],
        2: ["a12", "abc99"],
        3: ["a", "abcb"],
        4: ["yes", 'no\n"/é', "你好"],
    }
    bad = {
        0: [
            '{"name":"x"}',
            '{"name":"x","age":-1}',
            '{"age":1,"name":"x"}',
            '{"name":"x","age":1,"b":2}',
            "3",
        ],
        1: ["[]", "1", ""],
        2: ["a1", "12", "a123"],
        3: ["b", ""],
        4: ["yes ", "no", ""],
    }
    for index, constraint in enumerate(ALL):
        matcher = matcher_of(guide, constraint)
        assert all(takes(matcher, guide, text) for text in good[index])
        assert not any(takes(matcher, guide, text) for text in bad[index])


def test_ids_beyond_the_tokenizer_are_never_allowed(guide: LLTokenizer) -> None:
    matcher = matcher_of(guide, Constraint.regex(r"(.|\n)*"))
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    known = len(byte_level().get_vocab(with_added_tokens=True))
    assert known < VOCAB_SIZE and mask >> known == 0
    assert mask >> END & 1


def test_where_an_answer_is_whole_the_model_s_ends_are_allowed_all(folder: Path) -> None:
    guide = guide_tokenizer(folder, VOCAB_SIZE, [0, 2, VOCAB_SIZE])
    matcher = matcher_of(guide, Constraint.choice("a"))
    assert matcher.try_consume_tokens(guide.tokenize_str("a")) == 1
    assert int.from_bytes(matcher.compute_bitmask(), "little") == 0b101


def test_spaces_end_some_time(guide: LLTokenizer) -> None:
    matcher = matcher_of(guide, Constraint.json_object())
    assert takes(matcher, guide, "{" + " " * 16 + "}")
    assert not takes(matcher, guide, "{" + " " * 17 + "}")


def test_a_schema_cannot_ask_for_what_is_no_json(guide: LLTokenizer) -> None:
    loose = {"lenient": True, "item_separator": ";", "key_separator": "=", "coerce_one_of": True}
    matcher = matcher_of(guide, Constraint.json_schema({**PERSON, "x-guidance": loose}))
    assert takes(matcher, guide, '{"name":"x","age":3}')
    assert not takes(matcher, guide, '{"name"="x";"age"=3}')
    with pytest.raises(InvalidConstraint, match="cannot be held to not"):
        check(guide, Constraint.json_schema({"not": {}, "x-guidance": loose}))


@pytest.mark.parametrize(
    ("schema", "place", "said"),
    [
        ({"properties": {"a/b~": {"anyOf": [{}, {"not": {}}]}}}, "/properties/a~1b~0/anyOf/1", "held to not"),
        ({"properties": {"properties": {"uniqueItems": True}}}, "/properties/properties", "uniqueItems"),
        ({"$defs": {"x": {"if": {}}}, "properties": {"p": {"$ref": "#/$defs/x"}}}, "/$defs/x", "if"),
        ({"properties": {"p": {"$ref": "#/$defs/none"}}}, "/properties/p", "does not exist"),
        ({"items": {"type": "string", "pattern": "ab(?=c)"}}, "/items", "character 3 .* look-around"),
        ({"items": {"type": "string", "format": "iri"}}, "/items", "iri"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "", "minimum"),
        ({"oneOf": [{"type": "object"}, {"minLength": 1}]}, "", "oneOf"),
        ({"type": "text"}, "", "text"),
    ],
)
def test_what_a_schema_asks_in_vain_is_named_where_it_is(
    guide: LLTokenizer, schema: dict[str, Any], place: str, said: str
) -> None:
    with pytest.raises(InvalidConstraint, match=said) as caught:
        check(guide, Constraint.json_schema(schema))
    assert caught.value.place == place


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        (Constraint.json_schema("[1]"), "not a JSON object"),
        (Constraint.json_schema('{"type":'), "line 1 column"),
        (Constraint.json_schema('{"items":' * 200 + "{}" + "}" * 200), "recursion limit"),
        (Constraint.json_schema({"enum": []}), "."),
        (Constraint.json_schema({"enum": [1, 1 << 64]}), "more than 64 bits"),
        (Constraint.regex("x(?=a)b"), "character 2 .* look-around"),
        (Constraint.regex("a("), "character 2 .* unclosed group"),
        (Constraint.regex(r"\bfoo"), "lookarounds"),
        (Constraint.regex(r"(a)\1"), "character 4 .* backreferences"),
        (Constraint.regex(r"a[^\s\S]"), "no text fits"),
        (Constraint.regex("(" * 100_000), "character 100000 "),
        (Constraint.regex("(a{1000}){1000}"), "no choice for more than 16384"),
        (Constraint.regex("|".join(f"w{i}" for i in range(100_000))), "too much"),
        (Constraint.lark('start: "a" foo'), "line 1, column 8: unknown name"),
        (Constraint.lark('b: "a"\nstart: b /(?<=a)/'), "line 2, column 8: character 1 .* look-around"),
        (Constraint.lark("start: a\na: a"), "no text fits"),
        (Constraint.lark("what is this"), "line 1, column "),
    ],
)
def test_what_cannot_be_held_to_is_named(guide: LLTokenizer, constraint: Constraint, said: str) -> None:
    with pytest.raises(InvalidConstraint, match=said) as caught:
        check(guide, constraint)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_a_large_schema_is_not_searched_for_ever(guide: LLTokenizer) -> None:
    """The search for the place has a bound of its own: what it found until then is told."""
    wide = {f"p{i}": {"type": "object", "properties": {"q": {"type": "string"}}} for i in range(3000)}
    schema = json.dumps({"properties": {**wide, "last": {"not": {}}}})
    with pytest.raises(InvalidConstraint, match="cannot be held to not") as caught:
        check(guide, Constraint.json_schema(schema))
    assert caught.value.place in ("", "/properties/last")


def test_what_the_model_has_no_tokens_for_is_named(tmp_path: Path) -> None:
    """Where it is spelled out; a text that may hold it or not is held to what can be written."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator([r'abc yes no {"name": "\u0000x", "age": [12]}'], trainer)
    guide = guide_tokenizer(write_folder(tmp_path, tokenizer), 200, [END])
    named = {"properties": {"größe": {"type": "string"}}, "type": "object"}
    for schema, place in (
        ({"items": {"enum": ["yes", {"a": ["é"]}]}}, "/items/enum"),
        ({"const": "é"}, "/const"),
        (named, "/properties"),
        ({"anyOf": [{"type": "object", "required": ["é"]}]}, "/anyOf/0/required"),
    ):
        with pytest.raises(InvalidConstraint, match="has no tokens for") as caught:
            check(guide, Constraint.json_schema(schema))
        assert caught.value.place == place
    with pytest.raises(InvalidConstraint, match="has no tokens for 'é'"):
        check(guide, Constraint.choice("yes", "é"))
    check(guide, Constraint.json_schema({"enum": ["yes", "no"], "title": "é"}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
TEXTS = st.text(st.sampled_from('ab(){}[]|*+?^$\\.,:;/"-<>%&~_ \n0123é\x00'), max_size=40)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.builds(Constraint.json_schema, JSON.map(json.dumps) | TEXTS)
    | st.builds(Constraint.regex, TEXTS)
    | st.builds(Constraint.lark, TEXTS.map("start: {}".format) | TEXTS)
    | st.lists(TEXTS.filter(bool), min_size=1).map(lambda each: Constraint.choice(*each))
)
def test_whatever_comes_is_good_or_named(guide: LLTokenizer, constraint: Constraint) -> None:
    try:
        check(guide, constraint)
    except InvalidConstraint as error:
        assert str(error)
    else:
        assert not matcher_of(guide, constraint).is_error()


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_tokens_of_both_kinds_of_vocabularies_are_known(make: Any, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, make())
    guide = guide_tokenizer(folder, 512, [2])
    matcher = matcher_of(guide, Constraint.choice("the stop", "好"))
    assert takes(matcher, guide, "the stop")


def test_a_model_without_an_end_holds_answers_to_nothing(folder: Path) -> None:
    with pytest.raises(InvalidTokenizer, match="no end-of-sequence token"):
        guide_tokenizer(folder, VOCAB_SIZE, [])


def test_a_vocabulary_that_is_too_small_is_named(folder: Path) -> None:
    with pytest.raises(InvalidTokenizer, match=r"tokenizer\.json"):
        guide_tokenizer(folder, 100, [END])
