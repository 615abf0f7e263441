"""The resumption state machine, driven by hand: a clock of integers, no network."""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet import (
    AdapterNotFound,
    Cancelled,
    DeadlineExceeded,
    FinishReason,
    InternalError,
    LoraFleetError,
    QueueFull,
    Unavailable,
)
from lorafleet.answer import Answer, RetryPolicy
from lorafleet.constraints.constraint import Constraint
from lorafleet.requests import Options, generate_request
from lorafleet.v1 import common_pb2, inference_pb2

DIGEST = "sha256:" + "0" * 64
PIECES = ["a", "", "bc", "é", "🥊", "f"]
POLICY = RetryPolicy(resume_timeout=60, start_attempts=3, first_delay=1, max_delay=8)


def unavailable(retry_after: float | None = None) -> Unavailable:
    return Unavailable(grpc.StatusCode.UNAVAILABLE, "gone", retry_after=retry_after)


def make(deadline: float | None = None, **options: object) -> Answer:
    return Answer(generate_request("hi", Options(**options)), POLICY, deadline, chance=lambda: 0.0)


def serve(request: inference_pb2.GenerateRequest, size: int = 1) -> list[inference_pb2.GenerateChunk]:
    """What a correct server sends: the header alone, then `size` tokens a chunk."""
    start = len(request.resume.output_token_ids)
    header = inference_pb2.GenerateChunk(request_id="r", adapter_digest=DIGEST, seed=7, output_index=start)
    if request.response.echo:
        header.text = "hi"
    chunks = [header]
    for index in range(start, len(PIECES), size):
        end = min(index + size, len(PIECES))
        chunks.append(
            inference_pb2.GenerateChunk(
                output_index=index, token_ids=range(index, end), text="".join(PIECES[index:end])
            )
        )
    chunks[-1].finish_reason = common_pb2.FINISH_REASON_LENGTH
    chunks[-1].usage.completion_tokens = len(PIECES)
    return chunks


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 4), st.booleans()), max_size=12), st.booleans())
def test_any_breaks_give_the_undisturbed_answer(attempts: list[tuple[int, int, bool]], echo: bool) -> None:
    """attempts: chunks before the break, tokens a chunk, and whether it breaks with an error or just ends."""
    undisturbed = make(echo=echo)
    for chunk in serve(undisturbed.next_request()):
        undisturbed.accept(chunk)
    answer, received = make(echo=echo), []
    for limit, size, silent in [*attempts, (99, 1, True)]:
        if answer.done:
            break
        for chunk in serve(answer.next_request(), size)[:limit]:
            received.append(answer.accept(chunk))
        assert answer.after_break(None if silent else unavailable(), now=0.0) >= 0
    assert answer.done
    assert answer.generation() == undisturbed.generation()
    assert "".join(chunk.text for chunk in received) == answer.generation().text
    assert [t for chunk in received for t in chunk.token_ids] == list(range(len(PIECES)))
    assert received[-1].finish_reason is FinishReason.LENGTH


def test_the_resumed_request_carries_version_seed_and_tokens() -> None:
    answer = make(echo=True, seed=3, adapter="x@y")
    first = answer.next_request()
    for chunk in serve(first)[:3]:
        answer.accept(chunk)
    resumed = answer.next_request()
    assert resumed.resume == inference_pb2.Resume(adapter_digest=DIGEST, seed=7, output_token_ids=[0, 1])
    assert not resumed.response.echo  # the prompt's text is here already
    assert (resumed.adapter, resumed.sampling, resumed.request_id) == (
        first.adapter,
        first.sampling,
        first.request_id,
    )


def test_delays_double_up_to_the_limit_and_progress_resets_them() -> None:
    answer = make()
    chunks = serve(answer.next_request())
    answer.accept(chunks[0])
    assert [answer.after_break(unavailable(), now=0) for _ in range(5)] == [1, 2, 4, 8, 8]
    answer.next_request()
    answer.accept(chunks[0])  # a header is no progress
    assert answer.after_break(unavailable(), now=0) == 8
    answer.next_request()
    answer.accept(chunks[0])
    answer.accept(chunks[1])
    assert answer.after_break(unavailable(), now=0) == 1


def test_a_servers_retry_delay_is_never_undercut() -> None:
    answer = make()
    answer.accept(serve(answer.next_request())[0])
    assert answer.after_break(unavailable(retry_after=17), now=0) == 17
    assert answer.after_break(QueueFull(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"), now=0) == 2


def test_a_refused_request_is_tried_again_as_itself_where_the_policy_says_so() -> None:
    """Never before the told delay; some chance comes on top."""
    refused = QueueFull(grpc.StatusCode.RESOURCE_EXHAUSTED, "rate", reason="REQUEST_RATE", retry_after=3)
    chances = iter((0.0, 0.5))
    answer = Answer(
        generate_request("hi", Options()), RetryPolicy(refused_attempts=3), chance=lambda: next(chances, 0.0)
    )
    sent = answer.next_request()
    for chance in (0.0, 0.5):
        assert answer.after_break(refused, now=0) == pytest.approx(3 + chance / 10)
        assert answer.next_request() == sent and sent.request_id
    with pytest.raises(QueueFull):
        answer.after_break(refused, now=0)


def test_going_on_ends_after_resume_timeout_without_progress() -> None:
    answer = make()
    answer.accept(serve(answer.next_request())[0])
    answer.after_break(unavailable(), now=100)
    answer.after_break(unavailable(), now=157)
    with pytest.raises(Unavailable):
        answer.after_break(unavailable(), now=159)


@pytest.mark.parametrize(
    "error",
    [
        AdapterNotFound(grpc.StatusCode.NOT_FOUND, "no"),
        QueueFull(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after=1),
        DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, "late"),
        # Refused for an estimate: who comes again at once makes the queue longer.
        DeadlineExceeded(
            grpc.StatusCode.DEADLINE_EXCEEDED, "late", reason="DEADLINE_UNREACHABLE", retry_after=1
        ),
        QueueFull(grpc.StatusCode.RESOURCE_EXHAUSTED, "long", reason="QUEUE_TOO_LONG", retry_after=1),
        # The scheduler has waited as long as it may.
        Unavailable(grpc.StatusCode.UNAVAILABLE, "no executor", reason="NO_EXECUTOR", accepted=True),
    ],
)
def test_before_the_first_chunk_only_unavailable_is_tried_again(error: LoraFleetError) -> None:
    with pytest.raises(type(error)):
        make().after_break(error, now=0)
    answer = make()
    assert [answer.after_break(unavailable(), now=0) for _ in range(2)] == [1, 2]
    with pytest.raises(Unavailable):
        answer.after_break(unavailable(), now=0)


def test_what_was_accepted_is_asked_for_again_until_resume_timeout_before_its_first_chunk_too() -> None:
    """It is in a queue, or its prompt is read, when its scheduler dies; then nobody is there for a while."""
    answer = make()
    accepted = Unavailable(grpc.StatusCode.UNAVAILABLE, "gone", accepted=True)
    assert answer.after_break(accepted, now=0) == 1
    assert answer.next_request() == make(request_id=answer.next_request().request_id).next_request()
    assert [answer.after_break(unavailable(), now=0) for _ in range(4)] == [2, 4, 8, 8]
    assert answer.after_break(QueueFull(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"), now=0) == 8
    with pytest.raises(Unavailable):
        answer.after_break(unavailable(), now=59)


def test_what_a_server_has_answered_is_not_asked_again_for_long() -> None:
    """It accepted the request, and then could not read the adapter, after tries of its own."""
    answer = make()
    away = Unavailable(grpc.StatusCode.UNAVAILABLE, "away", reason="STORE_UNAVAILABLE", accepted=True)
    assert [answer.after_break(away, now=0) for _ in range(2)] == [1, 2]
    with pytest.raises(Unavailable, match="away"):
        answer.after_break(away, now=0)


def test_what_grpc_itself_is_out_of_is_tried_a_few_times() -> None:
    """A message that is too large stays so; a full queue of a server has a reason, and is waited for."""
    too_large = QueueFull(grpc.StatusCode.RESOURCE_EXHAUSTED, "received message larger than max")
    full = QueueFull(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL")
    answer = make()
    chunks = serve(answer.next_request())
    answer.accept(chunks[0])
    assert [answer.after_break(full, now=0) for _ in range(5)] == [1, 2, 4, 8, 8]
    assert [answer.after_break(too_large, now=0) for _ in range(2)] == [8, 8]
    answer.next_request()
    answer.accept(chunks[0])
    answer.accept(chunks[1])  # a token: what was too large has come through
    assert [answer.after_break(too_large, now=0) for _ in range(2)] == [1, 2]
    with pytest.raises(QueueFull, match="larger"):
        answer.after_break(too_large, now=0)


def test_who_was_accepted_says_so() -> None:
    answer = make()
    assert not answer.accepted
    answer.after_break(unavailable(), now=0)
    assert not answer.accepted
    answer.after_break(Unavailable(grpc.StatusCode.UNAVAILABLE, "gone", accepted=True), now=0)
    assert answer.accepted


LOST = (
    Cancelled(grpc.StatusCode.CANCELLED, "not taken up in time"),
    InternalError(grpc.StatusCode.INTERNAL, "RST_STREAM"),
    InternalError(grpc.StatusCode.UNKNOWN, "END_STREAM"),
)


@pytest.mark.parametrize("error", LOST)
def test_an_end_without_a_servers_word_is_a_lost_connection(error: LoraFleetError) -> None:
    unheard = make()
    assert [unheard.after_break(error, now=0) for _ in range(2)] == [1, 2]
    with pytest.raises(type(error)):
        unheard.after_break(error, now=0)
    begun = make()
    begun.accept(serve(begun.next_request())[0])
    assert [begun.after_break(error, now=0) for _ in range(5)] == [1, 2, 4, 8, 8]


@pytest.mark.parametrize(
    "word",
    [
        Cancelled(grpc.StatusCode.CANCELLED, "the client reads too slowly", reason="SLOW_CLIENT"),
        InternalError(grpc.StatusCode.INTERNAL, "internal error 1f", reason="INTERNAL"),
    ],
)
def test_a_servers_word_with_the_same_code_is_final(word: LoraFleetError) -> None:
    answer = make()
    answer.accept(serve(answer.next_request())[0])
    with pytest.raises(type(word)):
        answer.after_break(word, now=0)


def test_no_wait_goes_beyond_the_deadline() -> None:
    answer = make(deadline=10)
    assert answer.time_left(4) == 6
    with pytest.raises(Unavailable):
        answer.after_break(unavailable(retry_after=7), now=4)
    with pytest.raises(DeadlineExceeded):
        answer.time_left(10)


def test_a_gap_or_an_overlap_is_refused() -> None:
    for wrong in (1, 3):
        answer = make()
        header, first, second, *_ = serve(answer.next_request())
        for chunk in (header, first, second):
            answer.accept(chunk)
        with pytest.raises(InternalError, match=f"token {wrong} came after 2 tokens"):
            answer.accept(inference_pb2.GenerateChunk(output_index=wrong, token_ids=[wrong]))


@pytest.mark.parametrize("change", [{"adapter_digest": ""}, {"seed": 8}])
def test_another_version_or_seed_is_refused(change: dict[str, object]) -> None:
    answer = make()
    header = serve(answer.next_request())[0]
    answer.accept(header)
    answer.next_request()
    other = inference_pb2.GenerateChunk()
    other.CopyFrom(header)
    for name, value in change.items():
        setattr(other, name, value)
    with pytest.raises(InternalError):
        answer.accept(other)


@pytest.mark.parametrize(
    "options",
    [{"constraint": Constraint.json_object()}, {"allowed_token_ids": [1]}, {"bad_words": ["a"]}],
)
def test_a_server_that_is_too_old_for_constraints_is_told_apart(options: dict[str, object]) -> None:
    """At the beginning, and where another one goes on."""
    answer = make(**options)
    header, token, *_ = serve(answer.next_request())
    with pytest.raises(LoraFleetError, match="too old") as caught:
        answer.accept(header)
    assert (caught.value.code, caught.value.reason) == (
        grpc.StatusCode.UNIMPLEMENTED,
        "CONSTRAINTS_UNSUPPORTED",
    )
    answer = make(**options)
    header.masked = True
    answer.accept(header)
    answer.accept(token)
    resumed = serve(answer.next_request())
    with pytest.raises(LoraFleetError, match="too old"):
        answer.accept(resumed[0])


def test_a_whole_answer_survives_the_loss_of_its_connection() -> None:
    answer = make()
    for chunk in serve(answer.next_request()):
        answer.accept(chunk)
    assert answer.after_break(unavailable(), now=0) == 0
    assert answer.generation().text == "".join(PIECES)
    with pytest.raises(ValueError, match="not whole"):
        make().generation()


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_delays_are_bounded(attempt: int, chance: float) -> None:
    assert 0 < POLICY.delay(attempt, chance) <= POLICY.max_delay


def test_the_name_that_a_server_gave_an_answer_goes_back_to_it() -> None:
    """The one that came last: each server that takes the answer up names its part of it."""
    answer = make()
    assert answer.answer_id == ""
    first, *_ = serve(answer.next_request())
    first.answer_id = "ab.0"
    assert answer.accept(first).answer_id == "ab.0"
    answer.after_break(unavailable(), 0)
    request = answer.next_request()
    assert request.resume.answer_id == "ab.0"
    chunks = serve(request)
    chunks[0].answer_id = "ab.1"
    for chunk in chunks:
        assert answer.accept(chunk).answer_id == "ab.1"
    assert answer.generation().answer_id == "ab.1"


def test_a_server_that_names_no_answers_is_served_as_ever() -> None:
    answer = make()
    answer.accept(serve(answer.next_request())[0])
    answer.after_break(unavailable(), 0)
    assert answer.next_request().resume.answer_id == ""


def test_an_answer_that_was_lost_before_its_first_chunk_keeps_its_name() -> None:
    """From the metadata of the lost stream; a later break without any takes it from nobody."""
    answer, lost = make(), unavailable()
    lost.accepted, lost.answer_id = True, "ab.0"
    answer.after_break(lost, 0)
    answer.after_break(unavailable(), 1)
    assert answer.accepted and answer.answer_id == "ab.0"
    assert not answer.next_request().HasField("resume")
