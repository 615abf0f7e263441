"""The grammar of a constraint and its matcher: the same ones at admission and beside the draw."""

import json
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from lorafleet.constraints.constraint import Constraint, Kind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# JSON is JSON, whatever a schema asks of llguidance in "x-guidance": nothing is ignored, branches of oneOf
# exclude each other. Spaces are bounded, or a model that has nothing to say writes them for ever.
_JSON_OPTIONS: "JsonCompileOptions" = {
    "lenient": False,
    "coerce_one_of": False,
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \t\r\n]{1,16}",
}


class InvalidConstraint(Exception):
    """No answer can be held to it. `place` is where: a JSON pointer into the schema, or "" for the whole."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place


def parser_limits() -> LLParserLimits:
    """What one matcher may take: about 8 ms for a mask, and 40 MB for what it remembers of the tokens."""
    return LLParserLimits(
        max_items_in_row=1_000,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        step_max_items=5_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def grammar_of(constraint: Constraint) -> str:
    """The constraint in llguidance's own form, always the same text. Raises InvalidConstraint for a schema
    that is no JSON object; what else is wrong shows when a matcher is made."""
    match constraint.kind:
        case Kind.JSON_SCHEMA:
            return _of_schema(constraint.text)
        case Kind.JSON_OBJECT:
            return _of_schema('{"type": "object"}')
        case Kind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case Kind.LARK:
            return LLMatcher.grammar_from_lark(constraint.text)
        case Kind.CHOICE:
            # As one terminal: a grammar with a rule for each string takes far more to run.
            strings = " | ".join(map(json.dumps, constraint.choices))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {strings}")


def matcher_of(guide: LLTokenizer, constraint: Constraint) -> LLMatcher:
    """At the beginning of an answer. Raises InvalidConstraint for what llguidance does not take."""
    matcher = LLMatcher(guide, grammar_of(constraint), log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise InvalidConstraint(_without_dump(matcher.get_error()))
    return matcher


def _of_schema(text: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
    except ValueError as error:
        raise InvalidConstraint(f"is not a JSON object: {error}") from error


def _without_dump(message: str) -> str:
    """Behind this mark stands the parser's state, or that it is left out."""
    return message.partition("\n<")[0].strip()
