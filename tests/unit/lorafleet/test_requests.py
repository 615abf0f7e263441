from typing import Any

import pytest

from lorafleet import InvalidRequest, Options
from lorafleet.constraints.constraint import Constraint
from lorafleet.errors import ACCEPTED, ANSWER_ID, REQUEST_ID
from lorafleet.operations import generate
from lorafleet.requests import generate_request, tokenize_request
from lorafleet.v1 import common_pb2, inference_pb2


def test_every_option_reaches_its_field() -> None:
    options = Options(
        adapter="acme/a@b",
        max_new_tokens=1,
        min_new_tokens=2,
        stop=["x", "y"],
        stop_token_ids=[3],
        ignore_eos=True,
        time_limit_ms=4,
        temperature=0.5,
        top_k=5,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        seed=2**64 - 1,
        logit_bias={7: -100.0},
        logprobs=0,
        prompt_logprobs=1,
        echo=True,
        priority=-3,
        session_id="s",
        cache_salt="c",
        request_id="r",
        constraint=Constraint.choice("yes", "no"),
        allowed_token_ids=[8, 9],
        bad_words=["x", "y z"],
        masked_logprobs=True,
        timeout=9.0,
    )
    assert set(options) == set(Options.__annotations__)
    assert generate_request("hi", options) == inference_pb2.GenerateRequest(
        request_id="r",
        adapter="acme/a@b",
        text="hi",
        sampling=common_pb2.Sampling(
            temperature=0.5,
            top_k=5,
            top_p=0.25,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-1.0,
            frequency_penalty=2.0,
            seed=2**64 - 1,
            logit_bias={7: -100.0},
        ),
        stopping=common_pb2.Stopping(
            max_new_tokens=1,
            min_new_tokens=2,
            stop_sequences=["x", "y"],
            stop_token_ids=[3],
            ignore_eos=True,
            time_limit_ms=4,
        ),
        response=inference_pb2.ResponseOptions(
            logprobs=0, prompt_logprobs=1, echo=True, masked_logprobs=True
        ),
        constraint=common_pb2.Constraint(choice=common_pb2.Choice(choices=["yes", "no"])),
        allowed_token_ids=[8, 9],
        bad_words=["x", "y z"],
        priority=-3,
        session_id="s",
        cache_salt="c",
    )


def test_what_is_left_out_or_none_is_unset() -> None:
    request = generate_request("hi", Options(adapter=None, temperature=None, seed=None, stop=None))
    assert request == inference_pb2.GenerateRequest(request_id=request.request_id, text="hi")
    assert not request.HasField("adapter")
    assert request.request_id != generate_request("hi", Options()).request_id


def test_an_empty_adapter_is_sent_for_the_server_to_refuse() -> None:
    assert generate_request("hi", Options(adapter="")).HasField("adapter")


def test_one_stop_text_is_a_list_of_one() -> None:
    assert generate_request("hi", Options(stop="end")).stopping.stop_sequences == ["end"]


def test_token_ids_and_messages() -> None:
    assert list(generate_request([1, 2], Options()).token_ids.ids) == [1, 2]
    chat = generate_request([{"role": "user", "content": "hi"}], Options()).chat
    assert [(m.role, m.content) for m in chat.messages] == [("user", "hi")]
    assert tokenize_request([{"role": "user", "content": "hi"}], "a").chat == chat


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([], {}, "prompt"),
        ([1, -1], {}, "token_ids.ids"),
        ([1, "x"], {}, "token_ids.ids"),
        ([{"role": "user"}], {}, "chat.messages[0]"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": 3}], {}, "chat.messages[1]"),
        ("hi", {"top_k": -1}, "sampling.top_k"),
        ("hi", {"seed": 2**64}, "sampling.seed"),
        ("hi", {"temperature": "hot"}, "sampling.temperature"),
        ("hi", {"stop": 3}, "stopping.stop_sequences"),
        ("hi", {"logit_bias": {-1: 0.0}}, "sampling.logit_bias"),
    ],
)
def test_what_the_wire_cannot_carry_names_its_field(prompt: object, options: dict, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_request(prompt, options)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"max_tokens.*max_new_tokens"):
        generate_request("hi", {"max_tokens": 3})


def test_tokenize_takes_no_token_ids() -> None:
    with pytest.raises(InvalidRequest, match="give text or messages"):
        tokenize_request([1, 2], None)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (5, "prompt"),
        (b"text", "prompt"),
        ({"role": "user", "content": "hi"}, "prompt"),
        (iter([1, 2]), "prompt"),
        ("\ud800", "text"),
        ([{"role": "user", "content": "\ud800"}], "chat.messages[0]"),
        ([{"role": "user", "content": None}], "chat.messages[0]"),
        ([{"role": "user", "content": "hi"}, 5], "chat.messages[1]"),
        ([{"role": "user", "content": "hi", "tool_calls": []}], "chat.messages[0]"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(prompt: Any, field: str) -> None:
    for make in (lambda: generate_request(prompt, Options()), lambda: tokenize_request(prompt, None)):
        with pytest.raises(InvalidRequest) as caught:
            make()
        assert [violation.field for violation in caught.value.violations] == [field]


def test_what_no_message_takes_is_the_callers_mistake() -> None:
    """Told before anything is sent: gRPC itself would say that a resource is exhausted."""
    with pytest.raises(InvalidRequest, match="16777216") as caught:
        generate_request("word " * 4_000_000, Options())
    assert caught.value.violations[0].field == "prompt"
    with pytest.raises(InvalidRequest, match="16777216"):
        tokenize_request("word " * 4_000_000, None)


def test_a_call_tells_its_request_s_id_and_what_it_was_accepted_as() -> None:
    """In metadata, which take plain text only."""
    request = inference_pb2.GenerateRequest(request_id="mine")
    assert generate(request).metadata == ((REQUEST_ID, "mine"),)
    again = generate(request, again=True, answer_id="ab.0")
    assert again.metadata == ((REQUEST_ID, "mine"), ACCEPTED, (ANSWER_ID, "ab.0"))
    for other in ("", "m\u00efne"):
        assert generate(inference_pb2.GenerateRequest(request_id=other)).metadata == ()
