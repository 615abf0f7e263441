"""Ranges of constraints, allowed tokens and bad words, and what words are in tokens."""

import pytest

from lorafleet.v1 import common_pb2, executor_pb2, inference_pb2
from scheduler.admission.masks import NO_MASKS, Masks, bad_word_tokens, check_masks
from scheduler.errors import InvalidRequest

Constraint, Choice = common_pb2.Constraint, common_pb2.Choice
Request = inference_pb2.GenerateRequest


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(constraint=Constraint()), "constraint"),
        (Request(constraint=Constraint(json_object=False)), "constraint.json_object"),
        (Request(constraint=Constraint(json_schema="")), "constraint.json_schema"),
        (Request(constraint=Constraint(regex="")), "constraint.regex"),
        (Request(constraint=Constraint(regex="a" * (1 << 20))), "constraint.regex"),
        (Request(constraint=Constraint(lark="")), "constraint.lark"),
        (Request(constraint=Constraint(choice=Choice())), "constraint.choice.choices"),
        (Request(constraint=Constraint(choice=Choice(choices=["a"] * 4097))), "constraint.choice.choices"),
        (Request(constraint=Constraint(choice=Choice(choices=["é" * 40_000]))), "constraint.choice.choices"),
        (Request(constraint=Constraint(choice=Choice(choices=["a", ""]))), "constraint.choice.choices[1]"),
        (
            Request(constraint=Constraint(json_object=True), stopping=common_pb2.Stopping(ignore_eos=True)),
            "stopping.ignore_eos",
        ),
        (Request(allowed_token_ids=[3, 512]), "allowed_token_ids[1]"),
        (Request(allowed_token_ids=[3] * 4097), "allowed_token_ids"),
        (Request(bad_words=["a"] * 257), "bad_words"),
        (Request(bad_words=["a", " "]), "bad_words[1]"),
        (Request(bad_words=["a" * 257]), "bad_words[0]"),
    ],
)
def test_what_says_nothing_or_too_much_is_named(request_: inference_pb2.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_masks(request_, 512)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_what_is_in_range_is_taken() -> None:
    check_masks(Request(), 512)
    check_masks(Request(allowed_token_ids=[511] * 4096, bad_words=["x" * 256] * 256), 512)
    check_masks(Request(constraint=Constraint(choice=Choice(choices=["a"] * 4096))), 512)
    least = common_pb2.Stopping(min_new_tokens=9)
    check_masks(Request(constraint=Constraint(regex="a"), stopping=least), 512)


def test_a_word_is_bad_at_the_beginning_of_a_text_and_behind_another_word() -> None:
    tokens = {"the": [1], " the": [2], "好": [3, 4], " 好": [5, 3, 4], "a b": [6, 7], " a b": [6, 8]}
    words = ["the", " the", "好", "a b"]
    assert list(bad_word_tokens(words, tokens.__getitem__)) == [
        *((1,), (2,)),
        *((1,), (2,)),
        (3, 4),  # Behind a space of its own it is found, too.
        (6, 7),
    ]


def test_masks_go_into_the_dispatch_whole() -> None:
    masks = Masks(Constraint(regex="a"), (1, 2), ((3,), (4, 5)))
    dispatch = executor_pb2.Dispatch()
    masks.put_into(dispatch)
    assert dispatch == executor_pb2.Dispatch(
        constraint=Constraint(regex="a"),
        allowed_token_ids=[1, 2],
        bad_words=[
            executor_pb2.TokenSequence(token_ids=[3]),
            executor_pb2.TokenSequence(token_ids=[4, 5]),
        ],
    )
    assert masks and not NO_MASKS
