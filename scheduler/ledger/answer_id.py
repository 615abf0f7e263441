"""The scheduler's own name for an answer, which its client sends back with a resumption."""

import re
import secrets
from dataclasses import dataclass

from scheduler.errors import InvalidRequest

HEADER = "lorafleet-answer-id"  # Of a stream; and of a call that asks for a lost answer again.
_FORM = re.compile(r"([0-9a-f]{32})\.(0|[1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True)
class AnswerId:
    """`key` is that of the answer's records; `part` counts the resumptions, so that parts have an order which
    no clock decides."""

    key: str
    part: int = 0

    @classmethod
    def draw(cls) -> "AnswerId":
        return cls(secrets.token_hex(16))

    @classmethod
    def after(cls, told: str, field: str) -> "AnswerId":
        """Of the part that follows the one whose client sends `told`, as `field`. Raises InvalidRequest."""
        match = _FORM.fullmatch(told)
        if match is None:
            raise InvalidRequest(field, "is no answer_id: take it from the lost stream's first chunk")
        return cls(match[1], int(match[2]) + 1)

    def __str__(self) -> str:
        return f"{self.key}.{self.part}"
