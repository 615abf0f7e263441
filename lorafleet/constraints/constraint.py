"""What an answer's text must be, as it crosses borders: its kind, and the text of that kind."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lorafleet.v1 import common_pb2


class Kind(StrEnum):
    """What a constraint is; the values are names of fields on the wire."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    LARK = "lark"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Constraint:
    """Made by the class methods, or from the wire. Equal ones allow the same texts.

    `text` is the schema, the regular expression or the grammar, and "" for the other kinds. `choices` are the
    strings of a choice.
    """

    kind: Kind
    text: str = ""
    choices: tuple[str, ...] = ()

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> "Constraint":
        """JSON that fits a schema, given as JSON text or as what `json.loads` makes of it."""
        return cls(Kind.JSON_SCHEMA, schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def json_object(cls) -> "Constraint":
        """Any JSON object."""
        return cls(Kind.JSON_OBJECT)

    @classmethod
    def regex(cls, pattern: str) -> "Constraint":
        """A text that a regular expression matches from its first character to its last."""
        return cls(Kind.REGEX, pattern)

    @classmethod
    def lark(cls, grammar: str) -> "Constraint":
        """A text of a context-free grammar, from its rule `start`."""
        return cls(Kind.LARK, grammar)

    @classmethod
    def choice(cls, *choices: str) -> "Constraint":
        """One of these strings."""
        return cls(Kind.CHOICE, choices=choices)

    @classmethod
    def from_proto(cls, message: common_pb2.Constraint) -> "Constraint | None":
        """None: the message has no kind that is known here."""
        match message.WhichOneof("kind"):
            case None:
                return None
            case "json_object":
                return cls.json_object()
            case "choice":
                return cls.choice(*message.choice.choices)
            case field:
                return cls(Kind(field), getattr(message, field))

    def to_proto(self) -> common_pb2.Constraint:
        match self.kind:
            case Kind.JSON_OBJECT:
                return common_pb2.Constraint(json_object=True)
            case Kind.CHOICE:
                return common_pb2.Constraint(choice=common_pb2.Choice(choices=self.choices))
            case Kind.JSON_SCHEMA:
                return common_pb2.Constraint(json_schema=self.text)
            case Kind.REGEX:
                return common_pb2.Constraint(regex=self.text)
            case Kind.LARK:
                return common_pb2.Constraint(lark=self.text)
