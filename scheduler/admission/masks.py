"""What may be drawn: a constraint, allowed tokens and bad words, checked where no matcher is needed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lorafleet.v1 import common_pb2, executor_pb2, inference_pb2
from scheduler.admission.validation import check_token_ids
from scheduler.errors import InvalidRequest

MAX_CONSTRAINT_BYTES = 256 << 10  # What matchers' limits let through is smaller.
MAX_CHOICES, MAX_CHOICES_BYTES = 4096, 64 << 10
MAX_ALLOWED_TOKENS = 4096
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 256, 256


@dataclass(frozen=True, slots=True)
class Masks:
    """What a request asks an executor to hold its answer to. Nobody changes the message any more."""

    constraint: common_pb2.Constraint | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.constraint or self.allowed_token_ids or self.bad_words)

    def put_into(self, dispatch: executor_pb2.Dispatch) -> None:
        if self.constraint is not None:
            dispatch.constraint.CopyFrom(self.constraint)
        dispatch.allowed_token_ids.extend(self.allowed_token_ids)
        for word in self.bad_words:
            dispatch.bad_words.add(token_ids=word)


NO_MASKS = Masks()


def check_masks(request: inference_pb2.GenerateRequest, vocab_size: int) -> None:
    """All but what llguidance says of a constraint. Raises InvalidRequest."""
    if request.HasField("constraint"):
        _check_form(request.constraint)
        if request.stopping.ignore_eos:
            raise InvalidRequest(
                "stopping.ignore_eos", "an answer with a constraint ends where it is whole; leave one out"
            )
    if len(request.allowed_token_ids) > MAX_ALLOWED_TOKENS:
        raise InvalidRequest(
            "allowed_token_ids", f"has {len(request.allowed_token_ids)}, at most {MAX_ALLOWED_TOKENS}"
        )
    check_token_ids(request.allowed_token_ids, vocab_size, "allowed_token_ids")
    if len(request.bad_words) > MAX_BAD_WORDS:
        raise InvalidRequest("bad_words", f"has {len(request.bad_words)}, at most {MAX_BAD_WORDS}")
    for index, word in enumerate(request.bad_words):
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            raise InvalidRequest(
                f"bad_words[{index}]", f"needs 1 to {MAX_BAD_WORD_CHARS} characters, not only spaces"
            )


def _check_form(constraint: common_pb2.Constraint) -> None:
    kind = constraint.WhichOneof("kind")
    field = f"constraint.{kind}"
    if kind is None:
        raise InvalidRequest("constraint", "says nothing; leave it unset for any text")
    if kind == "choice":
        _check_choices(constraint.choice.choices)
    elif kind == "json_object":
        if not constraint.json_object:
            raise InvalidRequest(field, "must be true; leave the constraint unset for any text")
    elif not 1 <= constraint.ByteSize() <= MAX_CONSTRAINT_BYTES or not getattr(constraint, kind):
        raise InvalidRequest(field, f"needs 1 to {MAX_CONSTRAINT_BYTES} bytes")


def _check_choices(choices: Sequence[str]) -> None:
    field = "constraint.choice.choices"
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(field, f"needs 1 to {MAX_CHOICES}, has {len(choices)}")
    if (size := sum(len(choice.encode()) for choice in choices)) > MAX_CHOICES_BYTES:
        raise InvalidRequest(field, f"has {size} bytes, at most {MAX_CHOICES_BYTES}")
    for index, choice in enumerate(choices):
        if not choice:
            raise InvalidRequest(f"{field}[{index}]", "is empty")


def bad_word_tokens(
    words: Sequence[str], encode: Callable[[str], Sequence[int]]
) -> Iterator[tuple[int, ...]]:
    """The tokens of each word as a text begins with it, and as it stands behind another one, where that is a
    token of its own."""
    for word in words:
        alone = tuple(encode(word.lstrip()))
        if alone:
            yield alone
        behind = tuple(encode(" " + word.lstrip()))
        if behind and (not alone or (behind[0] != alone[0] and len(behind) == len(alone))):
            yield behind
