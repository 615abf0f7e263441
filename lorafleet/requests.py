"""Requests from what a user writes: prompts and options become messages; the server checks ranges."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

from lorafleet.constraints.constraint import Constraint
from lorafleet.errors import invalid
from lorafleet.v1 import inference_pb2

# Both sides agree on it (lorafleet/calls.py, scheduler/grpc_options.py).
MAX_MESSAGE_BYTES = 16 << 20

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Plain text, ready token ids, or a conversation: a list of {"role": ..., "content": ...}."""


class Options(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`; one that is left out or None takes the server's default.

    The fields of protos/lorafleet/v1/inference.proto and common.proto tell ranges and limits.
    """

    adapter: str | None
    """"[tenant/]name[@alias | @sha256:<64 hex>]"; None is the base model."""
    max_new_tokens: int | None
    """Default: up to the model's length."""
    min_new_tokens: int | None
    stop: str | Sequence[str] | None
    """The text ends before the first of these that appears."""
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    time_limit_ms: int | None
    """The answer ends well, with TIME_LIMIT, after so long; see `timeout` for the other way."""
    temperature: float | None
    """0, the default, is greedy."""
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    """Drawn by the server when left out, and told in the result."""
    logit_bias: Mapping[int, float] | None
    constraint: Constraint | None
    """What the answer's text must be, as `Constraint.json_schema({...})`."""
    allowed_token_ids: Sequence[int] | None
    """Only these are drawn."""
    bad_words: Sequence[str] | None
    """Strings that are not written, by tokens."""
    logprobs: int | None
    """0: of each generated token; n: also of the n most likely ones."""
    prompt_logprobs: int | None
    masked_logprobs: bool | None
    """Of generated tokens among those that constraint, allowed_token_ids and bad_words allow."""
    echo: bool | None
    """Begin the text with the prompt."""
    priority: int | None
    """Higher runs earlier among the tenant's own requests."""
    session_id: str | None
    cache_salt: str | None
    request_id: str | None
    """Made when left out. A second live call with the same one ends the first."""
    timeout: float | None
    """Seconds for the whole call, reconnections included, then DeadlineExceeded."""


_FIELDS = {
    "adapter": "adapter",
    "max_new_tokens": "stopping.max_new_tokens",
    "min_new_tokens": "stopping.min_new_tokens",
    "stop": "stopping.stop_sequences",
    "stop_token_ids": "stopping.stop_token_ids",
    "ignore_eos": "stopping.ignore_eos",
    "time_limit_ms": "stopping.time_limit_ms",
    "temperature": "sampling.temperature",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "min_p": "sampling.min_p",
    "repetition_penalty": "sampling.repetition_penalty",
    "presence_penalty": "sampling.presence_penalty",
    "frequency_penalty": "sampling.frequency_penalty",
    "seed": "sampling.seed",
    "logit_bias": "sampling.logit_bias",
    "constraint": "constraint",
    "allowed_token_ids": "allowed_token_ids",
    "bad_words": "bad_words",
    "logprobs": "response.logprobs",
    "prompt_logprobs": "response.prompt_logprobs",
    "masked_logprobs": "response.masked_logprobs",
    "echo": "response.echo",
    "priority": "priority",
    "session_id": "session_id",
    "cache_salt": "cache_salt",
    "request_id": "request_id",
}


def generate_request(prompt: Prompt, options: Options) -> inference_pb2.GenerateRequest:
    """Raises InvalidRequest for a value that the wire cannot carry, TypeError for an unknown option."""
    request = inference_pb2.GenerateRequest(request_id=uuid.uuid4().hex)
    _set_prompt(request, prompt)
    for name, value in options.items():
        if name == "timeout" or value is None:
            continue
        if name not in _FIELDS:
            raise TypeError(f"unknown option {name!r}; there are {', '.join(Options.__annotations__)}")
        _set(request, _FIELDS[name], [value] if name == "stop" and isinstance(value, str) else value)
    _check_size(request)
    return request


def asks_for_masks(request: inference_pb2.GenerateRequest) -> bool:
    """Whether its answer is to be held to something, which servers of before would pass over."""
    return bool(request.HasField("constraint") or request.allowed_token_ids or request.bad_words)


def tokenize_request(
    prompt: str | Sequence[Mapping[str, str]], adapter: str | None
) -> inference_pb2.TokenizeRequest:
    """Raises InvalidRequest when `prompt` is neither text nor a conversation, or too long for a message."""
    request = inference_pb2.TokenizeRequest(adapter=adapter)
    _set_prompt(request, prompt)
    _check_size(request)
    return request


def _set_prompt(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, prompt: Prompt
) -> None:
    if isinstance(prompt, str):
        _set(request, "text", prompt)
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        kind = type(prompt).__name__
        raise invalid("prompt", f"is of type {kind}; give text, a list of token ids or a list of messages")
    elif not prompt:
        raise invalid("prompt", "is empty; give text, token ids or messages")
    elif isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(_chat(cast(Sequence[Mapping[str, str]], prompt)))
    elif isinstance(request, inference_pb2.GenerateRequest):
        _set(request, "token_ids.ids", list(prompt))
    else:
        raise invalid("prompt", "give text or messages")


def _chat(messages: Sequence[Mapping[str, str]]) -> inference_pb2.Chat:
    chat = inference_pb2.Chat()
    for index, message in enumerate(messages):
        field = f"chat.messages[{index}]"
        match message:
            case {"role": str(role), "content": str(content), **rest} if not rest:
                pass
            case _:
                raise invalid(field, 'must be {"role": text, "content": text}, with nothing else')
        try:
            chat.messages.add(role=role, content=content)
        except ValueError as error:
            raise invalid(field, f"cannot be sent: {error}") from error
    return chat


def _check_size(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> None:
    """gRPC itself would say RESOURCE_EXHAUSTED, as if it were worth another try."""
    if (size := request.ByteSize()) > MAX_MESSAGE_BYTES:
        raise invalid("prompt", f"makes a message of {size} bytes, at most {MAX_MESSAGE_BYTES} are sent")


def _set(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, path: str, value: Any
) -> None:
    """Set the field at a dotted path; lists and maps are filled."""
    *parents, field = path.split(".")
    target: Any = request
    for parent in parents:
        target = getattr(target, parent)
    try:
        if isinstance(value, Constraint):
            getattr(target, field).CopyFrom(value.to_proto())
        elif isinstance(value, Mapping):
            getattr(target, field).update(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            getattr(target, field).extend(value)
        else:
            setattr(target, field, value)
    except (TypeError, ValueError, AttributeError) as error:
        raise invalid(path, f"cannot be {value!r:.60}: {error}") from error
