"""One request on its way through the engine: what was asked, and how far it is. Pure."""

from array import array
from dataclasses import dataclass, field
from enum import Enum

from executor.batch.blocks import BlockTable
from executor.batch.sampling import SamplingParams
from lorafleet.constraints.constraint import Constraint

# Which stream, and the dispatch id on it: schedulers name dispatches independently of each other.
Key = tuple[int, str]
TopTokens = tuple[tuple[int, float], ...]
# When its request was accepted, then its number here: smaller is older, and goes first. No two are the same.
Order = tuple[float, int]


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    TIME_LIMIT = "time_limit"


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a sequence ends by itself; counts include the tokens of earlier attempts."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What a scheduler asks for: `output_token_ids` were delivered before, generation goes on after them.

    `digest` is "" for the base model; `deadline`, and `accepted_at`, when the scheduler accepted the request,
    are on the engine's clock (seconds).
    """

    key: Key
    request_id: str
    digest: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopRules
    cache_salt: bytes = b""
    deadline: float | None = None
    prompt_logprobs: int | None = None
    accepted_at: float = 0.0
    constraint: Constraint | None = None
    allowed_token_ids: tuple[int, ...] = ()  # none: all are
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last token of each is not drawn behind the others


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Of one prompt position: its token, its log-probability (None at the first) and the likeliest tokens."""

    token_id: int
    logprob: float | None
    top: TopTokens


@dataclass(eq=False, slots=True)
class Sequence:
    """A dispatch and its progress. `token_ids` are known; the KV of the first `computed` of its `length`
    tokens is written, or will be by the steps that are launched.

    A launched step may draw a token that the host does not know yet: `ahead` of them follow `token_ids`, the
    last one in row `pending` of the sampler's last tokens. Planned with `ahead` 0 or 1.

    Running means that it holds a block `table` (and, with an adapter, a use of `slot`); waiting sequences
    hold nothing.
    """

    dispatch: Dispatch
    arrival: int
    arrived_at: float
    max_length: int = (
        1 << 62
    )  # tokens at which it ends, whatever they are; the last of them is never computed
    token_ids: "array[int]" = field(init=False)  # int64: what reads many of them needs no object for each
    computed: int = 0
    ahead: int = 0
    pending: int = -1
    in_flight: int = 0  # launched steps that it is part of
    table: BlockTable | None = None
    slot: int = -1
    ready: bool = True  # False: what its answer is held to is still being made
    started: bool = False
    cached_prompt_tokens: int = 0
    prompt_scores: list[PromptLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = array("q", (*self.dispatch.prompt_token_ids, *self.dispatch.output_token_ids))
        if self.dispatch.prompt_logprobs is not None:
            self.prompt_scores.append(PromptLogprob(self.token_ids[0], None, ()))

    @property
    def digest(self) -> str:
        return self.dispatch.digest

    @property
    def order(self) -> Order:
        return (self.dispatch.accepted_at, self.arrival)

    @property
    def length(self) -> int:
        return len(self.token_ids) + self.ahead

    @property
    def uncomputed(self) -> int:
        """Tokens whose KV a next token needs; 0 when it has all that it will ever have."""
        return min(self.length, self.max_length - 1) - self.computed

    def append(self, token_id: int) -> None:
        """The oldest token that was ahead is known now."""
        self.token_ids.append(token_id)
        self.ahead -= 1

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - len(self.dispatch.prompt_token_ids)

    @property
    def has_drawn(self) -> bool:
        """Whether a token of its own is known."""
        return self.num_outputs > len(self.dispatch.output_token_ids)

    @property
    def prompt_token_ids(self) -> "array[int]":
        return self.token_ids[: len(self.dispatch.prompt_token_ids)]

    @property
    def output_token_ids(self) -> "array[int]":
        return self.token_ids[len(self.dispatch.prompt_token_ids) :]

    @property
    def held(self) -> BlockTable:
        """The block table of a running sequence."""
        if self.table is None:
            raise RuntimeError(f"{self.dispatch.key} does not run")
        return self.table


@dataclass(frozen=True, slots=True)
class StopLimits:
    """What the model says about ends: its end-of-sequence ids and its length in tokens."""

    eos_token_ids: frozenset[int]
    max_model_len: int

    def max_length(self, dispatch: Dispatch) -> int:
        """Tokens, prompt included, at which a sequence ends with LENGTH."""
        most = dispatch.stop.max_new_tokens
        room = self.max_model_len
        return room if most is None else min(room, len(dispatch.prompt_token_ids) + most)

    def forbidden(self, sequence: Sequence) -> frozenset[int]:
        """Tokens that may not be drawn next: all ends, while fewer than min_new_tokens are there. With a
        constraint it is up to the sequence's guide."""
        rules = sequence.dispatch.stop
        if sequence.dispatch.constraint is not None:
            return frozenset()
        if not rules.min_new_tokens or sequence.num_outputs + sequence.ahead >= rules.min_new_tokens:
            return frozenset()
        return rules.stop_token_ids if rules.ignore_eos else rules.stop_token_ids | self.eos_token_ids

    def finished(self, sequence: Sequence) -> FinishReason | None:
        """Why the sequence, as it stands, is at its end; None when it goes on."""
        rules, last = sequence.dispatch.stop, sequence.token_ids[-1]
        stops = last in rules.stop_token_ids or (last in self.eos_token_ids and not rules.ignore_eos)
        if stops and sequence.num_outputs > rules.min_new_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.token_ids) >= sequence.max_length else None
