"""What a constraint spells out: characters that the model has tokens for, numbers that it can write."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLTokenizer

from lorafleet.constraints.constraint import Constraint, Kind
from lorafleet.constraints.grammar import InvalidConstraint

# llguidance reads larger ones as doubles, and would write other digits.
LEAST, MOST = -(1 << 63), (1 << 64) - 1


def check_literals(guide: LLTokenizer, constraint: Constraint) -> None:
    """Choices are checked, and values and names in a schema: a grammar may have other ways to go on.
    Raises InvalidConstraint."""
    if constraint.kind is Kind.CHOICE:
        _check_text(guide, "".join(constraint.choices), "")
    elif constraint.kind is Kind.JSON_SCHEMA:
        for place, value in _literals(json.loads(constraint.text), ""):
            if isinstance(value, str):
                _check_text(guide, value, place)
            elif isinstance(value, int) and not LEAST <= value <= MOST:
                raise InvalidConstraint("has more than 64 bits", place)


def _check_text(guide: LLTokenizer, text: str, place: str) -> None:
    for char in set(text):
        if not char.isascii() and guide.decode_str(guide.tokenize_str(char)) != char:
            raise InvalidConstraint(f"the model has no tokens for {char!r}", place)


def _literals(schema: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            below = f"{place}/{pointer_step(key)}"
            if key in ("const", "enum"):
                yield from ((below, leaf) for leaf in _leaves(value))
            elif key in ("properties", "required"):
                yield from ((below, name) for name in value if isinstance(name, str))
            if key not in ("const", "enum"):
                yield from _literals(value, below)
    elif isinstance(schema, list):
        for index, value in enumerate(schema):
            yield from _literals(value, f"{place}/{index}")


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def pointer_step(name: str) -> str:
    """One step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
