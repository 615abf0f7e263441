"""How fast an executor says that it is. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """0 is unknown, but for what is left. Times are in seconds, tokens by the second.

    token_interval: from one token of a sequence to its next. tokens: of all sequences together.
    prompt_tokens: in steps that have many. prompt_tokens_left: of accepted ones, not computed.
    answer_tokens_left: that accepted ones may still get, at most. page_in: from host memory into a slot.
    load: from the store or a disk cache into host memory.
    """

    token_interval: float = 0.0
    tokens: float = 0.0
    prompt_tokens: float = 0.0
    prompt_tokens_left: int = 0
    answer_tokens_left: int = 0
    page_in: float = 0.0
    load: float = 0.0


UNKNOWN = Rates()
