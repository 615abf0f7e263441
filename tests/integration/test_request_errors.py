"""Wrong requests: the code, the details and the field, while a stream beside them does not change."""

from collections.abc import Callable, Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import grpc
import pytest

from lorafleet.v1 import common_pb2, fleet_pb2, inference_pb2
from tests.support.services.cluster import Cluster, Pair, wait_until
from tests.support.services.failures import Failure, Stubs, bearer, failure, failure_of, raw_stubs
from tests.support.services.streams import Witness, watch

DIGEST = "sha256:" + "0" * 64
Request = inference_pb2.GenerateRequest
Chat, Message = inference_pb2.Chat, inference_pb2.ChatMessage


@pytest.fixture(autouse=True)
def unharmed(watched: Witness) -> Iterator[None]:
    yield
    watched.moves_on()


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": common_pb2.Sampling(**fields)}


def stopping(**fields: Any) -> dict[str, Any]:
    return {"stopping": common_pb2.Stopping(**fields)}


def response(**fields: Any) -> dict[str, Any]:
    return {"response": inference_pb2.ResponseOptions(**fields)}


def resume(*tokens: int, digest: str = "", seed: int = 0) -> dict[str, Any]:
    return {"resume": inference_pb2.Resume(adapter_digest=digest, seed=seed, output_token_ids=tokens)}


def ids(*token_ids: int) -> dict[str, Any]:
    return {"text": None, "token_ids": inference_pb2.TokenIds(ids=token_ids)}


def chat(*messages: Message) -> dict[str, Any]:
    return {"text": None, "chat": Chat(messages=messages)}


def request(**fields: Any) -> Request:
    """Valid but for `fields`."""
    fields = {"text": "The quick", **stopping(max_new_tokens=4), **fields}
    return Request(**{name: value for name, value in fields.items() if value is not None})


INVALID: list[tuple[dict[str, Any], str, str]] = [  # what is wrong, the field, what its message must say
    ({"adapter": ""}, "adapter", "unset"),
    ({"adapter": "Quiet"}, "adapter", "Quiet"),
    ({"adapter": " quiet"}, "adapter", " quiet"),
    ({"adapter": "../quiet"}, "adapter", ".."),
    ({"adapter": "a/b/c"}, "adapter", "a/b"),
    ({"adapter": "quiet@sha256:12"}, "adapter", "sha256:12"),
    ({"adapter": "q" * 10_000}, "adapter", "qqq"),
    ({"text": None}, "prompt", "missing"),
    ({"text": ""}, "prompt", "no tokens"),
    (ids(), "prompt", "no tokens"),
    (ids(5, 448), "token_ids.ids[1]", "448"),
    (ids(*[5] * 4096), "prompt", "4096"),
    ({"text": "x" * 300_000}, "prompt", "4096"),
    (chat(), "chat.messages", "has 0"),
    (chat(Message(content="hi")), "chat.messages[0].role", "1 to 64"),
    (sampling(temperature=nan), "sampling.temperature", "nan"),
    (sampling(temperature=-0.5), "sampling.temperature", "[0, 100]"),
    (sampling(temperature=inf), "sampling.temperature", "inf"),
    (sampling(top_p=0), "sampling.top_p", "(0, 1]"),
    (sampling(top_p=nan), "sampling.top_p", "nan"),
    (sampling(min_p=1.5), "sampling.min_p", "[0, 1]"),
    (sampling(repetition_penalty=0), "sampling.repetition_penalty", "(0, 10]"),
    (sampling(presence_penalty=nan), "sampling.presence_penalty", "nan"),
    (sampling(frequency_penalty=11), "sampling.frequency_penalty", "[-10, 10]"),
    (sampling(logit_bias={448: 1}), "sampling.logit_bias[448]", "vocabulary"),
    (sampling(logit_bias={3: nan}), "sampling.logit_bias[3]", "nan"),
    (stopping(max_new_tokens=0), "stopping.max_new_tokens", "at least 1"),
    (stopping(max_new_tokens=2, min_new_tokens=3), "stopping.min_new_tokens", "more than max_new_tokens"),
    (stopping(min_new_tokens=5000), "stopping.min_new_tokens", "do not fit"),
    (stopping(stop_sequences=["a", ""]), "stopping.stop_sequences[1]", "0 characters"),
    (stopping(stop_sequences=["a"] * 17), "stopping.stop_sequences", "at most 16"),
    (stopping(stop_token_ids=[9, 500]), "stopping.stop_token_ids[1]", "500"),
    (response(logprobs=21), "response.logprobs", "20"),
    (response(prompt_logprobs=21), "response.prompt_logprobs", "20"),
    ({"priority": 101}, "priority", "[-100, 100]"),
    ({"request_id": "r" * 129}, "request_id", "128"),
    ({"request_id": "a\nb"}, "request_id", "printable"),
    ({"session_id": "\x00"}, "session_id", "printable"),
    ({"cache_salt": "s" * 129}, "cache_salt", "128"),
    (resume(5, digest=DIGEST), "resume.adapter_digest", "base model"),
    ({"adapter": "quiet", **resume(5)}, "resume.adapter_digest", "missing"),
    ({**sampling(seed=1), **resume(5, seed=2)}, "resume.seed", "seed"),
    (resume(5, 5, 5, 5, 5), "resume.output_token_ids", "at most 4"),
    (resume(5, 448), "resume.output_token_ids[1]", "448"),
]


def ours(found: Failure, code: str, reason: str) -> None:
    assert (found.code, found.reason, found.domain) == (code, reason, "lorafleet"), found
    assert "Traceback" not in found.message and "/tmp" not in found.message
    assert (found.retry_s is not None) == (code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"))


@pytest.mark.parametrize(("wrong", "field", "text"), INVALID)
def test_invalid_fields_are_named(stubs: Stubs, wrong: dict[str, Any], field: str, text: str) -> None:
    calls = (stubs.inference.GenerateStream, stubs.inference.Generate)
    for found in [failure(call, request(**wrong), "ops") for call in calls]:
        ours(found, "INVALID_ARGUMENT", "INVALID_REQUEST")
        assert found.fields == (field,)
        assert field in found.message and text in found.message


@pytest.mark.parametrize("wrong", [{"adapter": ""}, {"text": None}, chat(), {"text": "x" * 300_000}])
def test_tokenize_checks_the_same(stubs: Stubs, wrong: dict[str, Any]) -> None:
    fields = {name: value for name, value in {"text": "a", **wrong}.items() if value is not None}
    found = failure(stubs.inference.Tokenize, inference_pb2.TokenizeRequest(**fields), "ops")
    ours(found, "INVALID_ARGUMENT", "INVALID_REQUEST")


UNKNOWN = [
    "nobody",
    "quiet.",
    "quiet@nobody",
    f"quiet@{DIGEST}",
    f"nobody@{DIGEST}",
    "nobody/quiet",
    "quie",
    "quiet2",
]


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_adapters_are_not_found(stubs: Stubs, name: str) -> None:
    """A misspelt name gets no answer of the base model."""
    for call in (stubs.inference.Generate, stubs.inference.GenerateStream):
        found = failure(call, request(adapter=name), "ops")
        ours(found, "NOT_FOUND", "ADAPTER_NOT_FOUND")
        assert name in found.message and found.metadata == {"adapter": name}


def test_what_a_caller_may_not_see_looks_like_nothing(stubs: Stubs, main: Pair) -> None:
    """A caller cannot find out which names another tenant has."""

    def ask(name: str, token: str) -> Failure:
        return failure(stubs.inference.Generate, request(adapter=name), token)

    with main.client("ops") as client:
        digest = client.adapters.get("quiet").digest
    for hidden, unknown in [
        ("default/quiet", "default/quite"),
        (f"default/quiet@{digest}", f"default/quiet@{DIGEST}"),
    ]:
        found, other = ask(hidden, "acme"), ask(unknown, "acme")
        ours(found, "NOT_FOUND", "ADAPTER_NOT_FOUND")
        assert found.message.replace(hidden, unknown) == other.message
        # A caller without any right learns no more.
        assert ask(hidden, "guest").message == found.message
    with main.client("acme") as client:
        assert client.generate("The", adapter="theirs", max_new_tokens=1).adapter_digest


def test_rights_and_identity(stubs: Stubs) -> None:
    calls: list[tuple[Any, Any]] = [
        (stubs.inference.Generate, request()),
        (stubs.inference.GenerateStream, request(adapter="theirs")),
        (stubs.inference.Tokenize, inference_pb2.TokenizeRequest(text="a")),
        (stubs.fleet.Watch, fleet_pb2.WatchFleetRequest()),
        (stubs.fleet.Cordon, fleet_pb2.CordonRequest(address="a:1")),
        (stubs.fleet.Drain, fleet_pb2.DrainExecutorRequest(address="a:1")),
    ]
    for call, message in calls:
        denied = failure(call, message, "guest")
        ours(denied, "PERMISSION_DENIED", "PERMISSION_DENIED")
        assert (
            denied.metadata["right"] in ("infer", "push", "manage", "operate")
            and denied.metadata["right"] in denied.message
        )
    for call, message in [*calls, (stubs.inference.ListModels, inference_pb2.ListModelsRequest())]:
        for token in (None, "guess", ""):
            ours(failure(call, message, token), "UNAUTHENTICATED", "UNAUTHENTICATED")


def test_an_unknown_executor_is_named(stubs: Stubs, main: Pair) -> None:
    cordon = fleet_pb2.CordonRequest(address="nowhere:1")
    found = failure(stubs.fleet.Cordon, cordon, "ops")
    ours(found, "INVALID_ARGUMENT", "INVALID_REQUEST")
    assert found.fields == ("address",) and main.executor.address in found.message


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        ("rank32", {"rank": 32, "std": 0.02, "targets": ["q_proj"]}, "32"),
        ("head", {"targets": ["lm_head"]}, "lm_head"),
        ("tables", {"targets": ["embed_tokens", "q_proj"]}, "embed_tokens"),
        ("full-head", {"targets": ["q_proj"], "modules_to_save": ["lm_head"]}, "--max-full-heads"),
    ],
)
def test_more_than_a_slot_holds_is_refused(
    main: Pair, stubs: Stubs, adapter: Callable[..., Path], name: str, fields: dict[str, Any], text: str
) -> None:
    with main.client("ops") as client:
        client.adapters.push(adapter(name, **fields), name)
    found = failure(stubs.inference.Generate, request(adapter=name), "ops")
    ours(found, "FAILED_PRECONDITION", "INCOMPATIBLE_ADAPTER")
    assert name in found.message and text in found.message


def test_a_second_call_with_one_name_aborts_the_first(main: Pair) -> None:
    with main.client("ops") as client, main.client("acme") as stranger:
        first = watch(client, [5, 6, 7], 3000, request_id="mine")
        other = watch(stranger, [5, 6, 7], 3000, request_id="mine")  # of another tenant
        first.wait_for(1)
        other.wait_for(1)
        second = client.generate([5, 6, 7], max_new_tokens=3, request_id="mine")
        assert len(second.token_ids) == 3
        error: Any = first.wait_end().error
        assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "SUPERSEDED")
        assert error.metadata == {"request_id": "mine"} and "mine" in error.message
        other.wait_for(len(other.tokens) + 1)


def test_a_deadline_is_a_status_and_a_time_limit_an_end(main: Pair, stubs: Stubs) -> None:
    endless = stopping(max_new_tokens=4000, ignore_eos=True)
    found = failure(stubs.inference.GenerateStream, request(**endless), "ops", timeout=0.3)
    assert found.code == "DEADLINE_EXCEEDED"
    limited = stopping(max_new_tokens=4000, ignore_eos=True, time_limit_ms=1500)  # enough for a first token
    for answer in (
        stubs.inference.Generate(request(**limited), metadata=bearer("ops")),
        list(stubs.inference.GenerateStream(request(**limited), metadata=bearer("ops")))[-1],
    ):
        assert answer.finish_reason == common_pb2.FINISH_REASON_TIME_LIMIT
        assert 0 < answer.usage.completion_tokens < 4000


def test_a_full_queue_says_when_to_come_again(one: Pair) -> None:
    """4 seats and 40 places: of 60 long requests at once, 44 are taken and 16 refused."""
    with raw_stubs(one.scheduler.address) as stubs:
        endless = request(**stopping(max_new_tokens=4000, ignore_eos=True))
        calls = [stubs.inference.GenerateStream(endless) for _ in range(60)]
        wait_until(lambda: sum(call.done() for call in calls) == 16, "what is too much is refused")
        for call in (call for call in calls if call.done()):
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            found = failure_of(caught.value)
            ours(found, "RESOURCE_EXHAUSTED", "QUEUE_FULL")
            assert found.retry_s and found.retry_s > 0 and "full" in found.message
        for call in calls:
            call.cancel()
        one.wait_idle()
        assert len(stubs.inference.Generate(request()).token_ids) <= 4


def test_without_an_executor_requests_are_unavailable(cluster: Cluster) -> None:
    lonely = cluster.scheduler("lonely", ["127.0.0.1:1"], "--queue-timeout", "0.3").start()
    wait_until(lambda: lonely.health() == "SERVING", "it listens")
    assert lonely.health("lorafleet.v1.Inference") == "NOT_SERVING"
    with raw_stubs(lonely.address) as stubs:
        found = failure(stubs.inference.Generate, request())
        ours(found, "UNAVAILABLE", "NO_EXECUTOR")
        assert "executor" in found.message
        assert stubs.inference.Tokenize(inference_pb2.TokenizeRequest(text="a b")).token_ids
    lonely.stop()
