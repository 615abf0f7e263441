"""From tokens to text, piece by piece."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Tokens that go to the client now, and all the text they complete."""

    token_ids: tuple[int, ...]
    text: str
    stopped: bool
