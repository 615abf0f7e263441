from typing import Any

import pytest

from executor.batch.sampling import SampledToken
from executor.batch.sequence import PromptLogprob
from executor.errors import InvalidDispatch
from executor.events import NewToken
from executor.wire import MAX_STEP_BYTES, dispatch_from, step_events
from lorafleet.constraints.constraint import Constraint
from lorafleet.v1 import common_pb2, executor_pb2

TOP = tuple((2**20 + i, -1.5) for i in range(20))


def token(name: str, prompt: int = 0) -> NewToken:
    scores = (PromptLogprob(5, None, ()), *[PromptLogprob(2**20, -1.5, TOP)] * (prompt - 1)) if prompt else ()
    return NewToken(
        (1, name), 3, SampledToken(7, -0.5, TOP), wants_logprobs=bool(prompt), prompt_scores=scores
    )


def names(event: executor_pb2.ExecutorEvent) -> list[str]:
    return list(event.step.dispatch_ids)


def test_all_tokens_of_a_step_are_one_event() -> None:
    [event] = step_events(9, [token("a"), token("b", prompt=5), token("c")])
    assert (event.step.step, names(event)) == (9, ["a", "b", "c"])
    assert (list(event.step.token_ids), list(event.step.first_output_index)) == ([7] * 3, [3] * 3)
    assert list(event.step.token_counts) == [1] * 3
    assert [(entry.dispatch_id, len(entry.prompt_positions)) for entry in event.step.logprobs] == [("b", 5)]


def test_large_prompts_that_end_in_one_step_are_split() -> None:
    """Each dispatch stays whole, and the order is kept; an event with several stays below the bound."""
    tokens = [token(f"{n}", prompt=12_000 if n % 2 else 0) for n in range(10)]
    events = list(step_events(9, tokens))
    assert [name for event in events for name in names(event)] == [f"{n}" for n in range(10)]
    assert len(events) > 1
    assert all(event.ByteSize() < MAX_STEP_BYTES + 10_000 for event in events)
    assert sum(len(e.prompt_positions) for event in events for e in event.step.logprobs) == 5 * 12_000


def test_a_request_is_as_old_as_its_scheduler_says() -> None:
    message = executor_pb2.Dispatch(dispatch_id="a", prompt_token_ids=[5], waited_ms=2500)
    assert dispatch_from(message, 1, now=100.0).accepted_at == 97.5


def test_what_holds_an_answer_comes_with_its_dispatch() -> None:
    message = executor_pb2.Dispatch(
        dispatch_id="a",
        prompt_token_ids=[5],
        constraint=Constraint.choice("x", "y").to_proto(),
        allowed_token_ids=[7, 3],
        bad_words=[{"token_ids": [1]}, {"token_ids": [2, 3]}],
        masked_logprobs=True,
    )
    dispatch = dispatch_from(message, 1, now=100.0)
    assert dispatch.constraint == Constraint.choice("x", "y")
    assert (dispatch.allowed_token_ids, dispatch.bad_words) == ((7, 3), ((1,), (2, 3)))
    assert dispatch.sampling.masked_logprobs


@pytest.mark.parametrize(
    ("field", "value"),
    [("constraint", common_pb2.Constraint()), ("bad_words", [executor_pb2.TokenSequence()])],
)
def test_what_holds_nothing_is_refused_by_name(field: str, value: Any) -> None:
    message = executor_pb2.Dispatch(dispatch_id="a", prompt_token_ids=[5], **{field: value})
    with pytest.raises(InvalidDispatch, match=f"^{field}"):
        dispatch_from(message, 1, now=100.0)
