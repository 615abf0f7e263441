"""Whether answers can be held to a constraint, and if not, where it says what they cannot be held to."""

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from lorafleet.constraints.constraint import Constraint, Kind
from lorafleet.constraints.grammar import InvalidConstraint, matcher_of
from lorafleet.constraints.literals import check_literals, pointer_step

PLACE_S = 0.4  # Of CPU time, to find where in a schema something is.
MAX_FORCED_BYTES = 16_384
_DEAD_END = "NoExtension"
_TOO_LARGE = re.compile("too big|too large|precomputation failed")
_SHARED = ("$schema", "$defs", "definitions")  # What parts of a schema refer to.
_UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: (\[.*\])")
_PLACE_IN_GRAMMAR = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_REGEX_ERROR = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)\^+.*\nerror: (.*)")


def check(guide: LLTokenizer, constraint: Constraint) -> None:
    """Makes a matcher and its first mask, as an executor will. Raises InvalidConstraint."""
    try:
        matcher = matcher_of(guide, constraint)
    except InvalidConstraint as error:
        raise _explained(guide, constraint, str(error)) from error
    check_literals(guide, constraint)
    _check_begins(matcher)


def _check_begins(matcher: LLMatcher) -> None:
    matcher.compute_bitmask()
    error = _first_line(matcher.get_error())
    if error.startswith(_DEAD_END):
        raise InvalidConstraint("no text fits it")
    if error:
        raise InvalidConstraint(f"takes too much to hold to: {error}")
    # Each mask walks over all that is forced; nothing else bounds what is so from the beginning.
    if len(matcher.compute_ff_bytes()) > MAX_FORCED_BYTES:
        raise InvalidConstraint(f"leaves no choice for more than {MAX_FORCED_BYTES} bytes")


def _explained(guide: LLTokenizer, constraint: Constraint, message: str) -> InvalidConstraint:
    if _TOO_LARGE.search(message):
        return InvalidConstraint(f"takes too much to hold to: {_first_line(message)}")
    match constraint.kind:
        case Kind.JSON_SCHEMA:
            return InvalidConstraint(_about_schema(message), _place(guide, constraint.text, message))
        case Kind.REGEX:
            return InvalidConstraint(_about_regex(message))
        case _:
            return InvalidConstraint(_about_grammar(message))


def _about_schema(message: str) -> str:
    if match := _UNKNOWN_KEYWORDS.search(message):
        return f"answers cannot be held to {', '.join(json.loads(match[1]))}"
    if message.startswith("oneOf"):
        return "answers cannot be held to oneOf where several of its schemas may fit; use anyOf"
    return _about_regex(message)


def _about_regex(message: str) -> str:
    """The library shows the expression, which may be long, and marks the place below it."""
    if match := _REGEX_ERROR.search(message):
        return f"character {len(match[2]) + 1} of the regular expression: {match[3]}"
    return _first_line(message).rpartition("(in regex): ")[2].partition(" in regex /")[0]


def _about_grammar(message: str) -> str:
    line = _first_line(message)
    if match := _PLACE_IN_GRAMMAR.match(line):
        said = _about_regex(message) if "(in regex)" in message else line[match.end() :]
        return f"line {match[1]}, column {match[2]}: {said}"
    return line


def _first_line(message: str) -> str:
    return message.partition("\n")[0]


def _place(guide: LLTokenizer, text: str, message: str) -> str:
    """A JSON pointer to the smallest part that is refused for the same reason when it stands alone."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(schema, Mapping):
        return ""
    until = time.process_time() + PLACE_S
    shared = {key: schema[key] for key in _SHARED if key in schema}
    place, part = "", schema
    while (found := _refused_part(guide, shared, part, message, until)) is not None:
        step, part = found
        place += step
    return place


def _refused_part(
    guide: LLTokenizer, shared: Mapping[str, Any], schema: Mapping[str, Any], message: str, until: float
) -> tuple[str, Mapping[str, Any]] | None:
    for step, part in _parts(schema):
        if time.process_time() > until:
            return None
        try:
            matcher_of(guide, Constraint.json_schema({**shared, **part}))
        except InvalidConstraint as error:
            if str(error) == message:
                return step, part
    return None


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Schemas one or two steps below: what is below "properties" or "anyOf" is named by the pair."""
    for key, value in schema.items():
        if isinstance(value, Mapping):
            yield _step(key), value
            yield from ((_step(key) + _step(name), part) for name, part in _inner(value.items()))
        elif isinstance(value, list):
            yield from ((_step(key) + _step(str(index)), part) for index, part in _inner(enumerate(value)))


def _inner(items: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    return ((name, part) for name, part in items if isinstance(part, Mapping))


def _step(name: str) -> str:
    return f"/{pointer_step(name)}"
