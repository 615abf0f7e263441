"""Every range in the proto comments, at and beyond its ends."""

import math
from typing import Any

import pytest

from lorafleet.v1 import common_pb2, inference_pb2
from scheduler.admission import validation
from scheduler.errors import InvalidRequest

VOCAB = 512
NAN = math.nan


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0, 1, 100], [-0.1, 100.1, NAN, math.inf]),
        ("top_k", [0, 1, 2**32 - 1], []),
        ("top_p", [1e-6, 1], [0, -1, 1.1, NAN]),
        ("min_p", [0, 1], [-0.1, 1.1, NAN]),
        ("repetition_penalty", [1e-6, 10], [0, -1, 10.1, NAN, math.inf]),
        ("presence_penalty", [-10, 0, 10], [-10.1, 10.1, NAN]),
        ("frequency_penalty", [-10, 0, 10], [-10.1, 10.1, NAN]),
        ("seed", [0, 2**64 - 1], []),
        (
            "logit_bias",
            [{511: 100.0, 0: -100.0}],
            [{512: 1.0}, {1: 100.1}, {1: NAN}, dict.fromkeys(range(1025), 0.0)],
        ),
    ],
)
def test_sampling(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        validation.check_sampling(common_pb2.Sampling(**{field: value}), VOCAB)
    for value in bad:
        with pytest.raises(InvalidRequest) as caught:
            validation.check_sampling(common_pb2.Sampling(**{field: value}), VOCAB)
        assert caught.value.violations[0][0].startswith(f"sampling.{field}")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_new_tokens": 0}, "stopping.max_new_tokens"),
        ({"max_new_tokens": 3, "min_new_tokens": 4}, "stopping.min_new_tokens"),
        ({"stop_sequences": ["x"] * 17}, "stopping.stop_sequences"),
        ({"stop_sequences": ["x", ""]}, "stopping.stop_sequences[1]"),
        ({"stop_sequences": ["x" * 257]}, "stopping.stop_sequences[0]"),
        ({"stop_token_ids": [1] * 65}, "stopping.stop_token_ids"),
        ({"stop_token_ids": [1, 512]}, "stopping.stop_token_ids[1]"),
    ],
)
def test_stopping_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validation.check_stopping(common_pb2.Stopping(**fields), VOCAB)
    assert caught.value.violations[0][0] == named


def test_stopping_at_its_limits() -> None:
    stopping = common_pb2.Stopping(
        max_new_tokens=3,
        min_new_tokens=3,
        stop_sequences=["é" * 256] * 16,
        stop_token_ids=[511] * 64,
        time_limit_ms=2**32 - 1,
    )
    validation.check_stopping(stopping, VOCAB)


@pytest.mark.parametrize(("asked", "room", "given"), [(None, 90, 90), (5, 90, 5), (500, 90, 90)])
def test_max_new_tokens_is_completed_to_the_model_s_length(asked: int | None, room: int, given: int) -> None:
    stopping = common_pb2.Stopping(max_new_tokens=asked, ignore_eos=True)
    completed = validation.complete_stopping(stopping, 100 - room, 100)
    assert (completed.max_new_tokens, completed.ignore_eos) == (given, True)
    assert stopping.HasField("max_new_tokens") == (asked is not None)


def test_lengths_that_do_not_fit_are_named_with_numbers() -> None:
    with pytest.raises(InvalidRequest, match=r"has 100 tokens; the model takes 100"):
        validation.complete_stopping(common_pb2.Stopping(), 100, 100)
    with pytest.raises(InvalidRequest, match=r"min_new_tokens: 11 do not fit.*90 tokens.*100"):
        validation.complete_stopping(common_pb2.Stopping(min_new_tokens=11), 90, 100)


@pytest.mark.parametrize("field", ["request_id", "session_id", "cache_salt"])
def test_labels(field: str) -> None:
    validation.check_labels(inference_pb2.GenerateRequest(**{field: "é" * 128}))
    for bad in ("x" * 129, "a\nb", "a\0", "\u202e"):
        with pytest.raises(InvalidRequest) as caught:
            validation.check_labels(inference_pb2.GenerateRequest(**{field: bad}))
        assert caught.value.violations[0][0] == field


@pytest.mark.parametrize("priority", [-101, 101])
def test_priority(priority: int) -> None:
    validation.check_labels(inference_pb2.GenerateRequest(priority=priority // 101 * 100))
    with pytest.raises(InvalidRequest, match="priority"):
        validation.check_labels(inference_pb2.GenerateRequest(priority=priority))


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (inference_pb2.GenerateRequest(), "prompt"),
        (inference_pb2.GenerateRequest(text="x", adapter=""), "adapter"),
        (inference_pb2.GenerateRequest(chat=inference_pb2.Chat()), "chat.messages"),
        (
            inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage()])),
            "chat.messages[0].role",
        ),
    ],
)
def test_prompt_form(request_: inference_pb2.GenerateRequest, named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validation.check_prompt_form(request_)
    assert caught.value.violations[0][0] == named


def _largest_position(alternatives: int) -> common_pb2.PositionLogprobs:
    token = common_pb2.TokenLogprob(token_id=2**32 - 1, logprob=-1.5)
    return common_pb2.PositionLogprobs(chosen=token, top=[token] * alternatives)


@pytest.mark.parametrize("alternatives", [0, 1, 8, 9, 20])
def test_prompt_logprobs_have_a_bound(alternatives: int) -> None:
    response = inference_pb2.ResponseOptions(prompt_logprobs=alternatives)
    most = validation.MAX_PROMPT_LOGPROBS_BYTES // (13 * (alternatives + 1) + 3)
    chunk = inference_pb2.GenerateChunk(prompt_logprobs=[_largest_position(alternatives)] * most)
    assert chunk.ByteSize() <= validation.MAX_PROMPT_LOGPROBS_BYTES
    validation.check_prompt_logprobs(response, most)
    with pytest.raises(InvalidRequest, match=f"{most + 1} tokens.*most {most} fit") as caught:
        validation.check_prompt_logprobs(response, most + 1)
    assert caught.value.violations[0][0] == "response.prompt_logprobs"


@pytest.mark.parametrize("alternatives", [0, 1, 8, 9, 20])
def test_a_whole_answer_fits_into_a_message(alternatives: int) -> None:
    response = inference_pb2.ResponseOptions(logprobs=alternatives)
    most = validation.MAX_LOGPROBS_BYTES // (13 * (alternatives + 1) + 3)
    whole = inference_pb2.GenerateResponse(logprobs=[_largest_position(alternatives)] * most)
    assert whole.ByteSize() <= validation.MAX_LOGPROBS_BYTES
    validation.check_fits_one_message(response, common_pb2.Stopping(max_new_tokens=most))
    with pytest.raises(InvalidRequest, match=f"{most + 1} tokens.*most {most} fit") as caught:
        validation.check_fits_one_message(response, common_pb2.Stopping(max_new_tokens=most + 1))
    assert caught.value.violations[0][0] == "response.logprobs"


def test_sizes_are_free_without_log_probabilities() -> None:
    response = inference_pb2.ResponseOptions()
    validation.check_prompt_logprobs(response, 10**9)
    validation.check_fits_one_message(response, common_pb2.Stopping(max_new_tokens=10**9))


def test_an_echo_has_a_bound() -> None:
    validation.check_echo("x" * validation.MAX_ECHO_BYTES)
    with pytest.raises(InvalidRequest, match=f"{validation.MAX_ECHO_BYTES + 2} bytes"):
        validation.check_echo("é" * (validation.MAX_ECHO_BYTES // 2 + 1))


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_response(field: str) -> None:
    validation.check_response(inference_pb2.ResponseOptions(**{field: 20}))
    with pytest.raises(InvalidRequest, match=f"response.{field}"):
        validation.check_response(inference_pb2.ResponseOptions(**{field: 21}))


def test_resume() -> None:
    stopping = common_pb2.Stopping(max_new_tokens=3)

    def check(seed: int | None, ids: list[int]) -> tuple[int, ...]:
        request = inference_pb2.GenerateRequest(
            sampling=common_pb2.Sampling(seed=seed), resume=inference_pb2.Resume(seed=7, output_token_ids=ids)
        )
        return validation.check_resume(request, stopping, VOCAB)

    assert check(None, [1, 2, 511]) == (1, 2, 511)
    assert check(7, []) == ()
    for seed, ids, named in ((8, [], "resume.seed"), (7, [1] * 4, "resume.output"), (7, [512], r"ids\[0\]")):
        with pytest.raises(InvalidRequest, match=named):
            check(seed, ids)
    assert validation.check_resume(inference_pb2.GenerateRequest(), stopping, VOCAB) == ()
