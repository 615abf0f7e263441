"""What proves that a request was accepted: for which tenant and which request it does, and how often."""

from typing import Any

import pytest

from lorafleet.v1 import common_pb2, inference_pb2
from scheduler.errors import InvalidRequest
from scheduler.ledger.answer_id import MOST_AGE_S, MOST_KEPT, MOST_TIMES, AnswerId, AnswerIds

FIELD = "resume.answer_id"


def request(**fields: Any) -> inference_pb2.GenerateRequest:
    stopping = common_pb2.Stopping(max_new_tokens=fields.pop("max_new_tokens", 5))
    return inference_pb2.GenerateRequest(
        **{"request_id": "mine", "text": "Hello", "stopping": stopping, **fields}
    )


def test_an_answer_is_known_by_all_who_have_the_secret_and_by_nobody_else() -> None:
    ids, told = AnswerIds(b"secret"), AnswerIds(b"secret").draw("acme", request())
    assert told.part == 0 and ids.after(str(told), FIELD, "acme", request()) == AnswerId(told.key, 1)
    assert AnswerIds(b"another").after(str(told), FIELD, "acme", request()) is None
    assert ids.after(f"{'0' * 32}.0", FIELD, "acme", request()) is None
    assert ids.after(str(told), FIELD, "zoo", request()) is None
    assert ids.draw("acme", request()) != told


@pytest.mark.parametrize(
    "other",
    [
        {"request_id": "other"},
        {"request_id": ""},
        {"text": "Hello, you"},
        {"token_ids": inference_pb2.TokenIds(ids=[1, 2])},
        {"chat": inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="x" * 50)])},
        {"adapter": "acme/support"},
        {"max_new_tokens": 6},
    ],
)
def test_it_is_of_one_request_and_what_that_costs(other: dict[str, Any]) -> None:
    ids = AnswerIds(b"secret")
    told = str(ids.draw("acme", request()))
    assert ids.after(told, FIELD, "acme", request(**other)) is None
    assert ids.after(told, FIELD, "acme", request(resume=inference_pb2.Resume(seed=1)))


def test_a_day_later_it_proves_nothing() -> None:
    now = [1_800_000_000.0]
    ids = AnswerIds(b"secret", clock=lambda: now[0])
    told = str(ids.draw("acme", request()))
    now[0] += MOST_AGE_S - 1
    assert ids.after(told, FIELD, "acme", request())
    now[0] += 3
    assert ids.after(told, FIELD, "acme", request()) is None


def test_a_scheduler_takes_it_up_some_times_for_what_was_paid_once() -> None:
    ids = AnswerIds(b"secret")
    first = ids.draw("acme", request())
    assert not ids.is_paid(first)
    for _ in range(MOST_TIMES):
        again = ids.after(str(first), FIELD, "acme", request())
        assert again and ids.is_paid(again)
        ids.taken_up(again)
    assert again and not ids.is_paid(again)
    for number in range(MOST_KEPT):
        ids.taken_up(AnswerId(f"{number:032x}", 1))
    assert len(ids._times) == MOST_KEPT


@pytest.mark.parametrize(
    "told", ["x", "ab.0", "ab" * 16, "ab" * 16 + ".-1", "AB" * 16 + ".1", "ab" * 17 + ".1"]
)
def test_what_is_no_answer_id_is_an_error(told: str) -> None:
    with pytest.raises(InvalidRequest, match=FIELD):
        AnswerIds(b"secret").after(told, FIELD, "acme", request())
