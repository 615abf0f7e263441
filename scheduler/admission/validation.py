"""Checks the ranges that proto comments promise, and completes stopping rules. Pure."""

import math
from collections.abc import Sequence

from lorafleet.v1 import common_pb2, inference_pb2
from scheduler.errors import InvalidRequest

MAX_LOGIT_BIASES = 1024
MAX_STOP_SEQUENCES = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_PRIORITY = 100
MAX_LABEL_CHARS = 128
MAX_CHAT_MESSAGES = 4096
MAX_ROLE_CHARS = 64
# A message has at most 16 MiB (scheduler/grpc_options.py). An answer that is sent whole may put so many bytes
# of log-probabilities into one, and an echoed prompt so many of text: room is left for tokens and their text.
MAX_LOGPROBS_BYTES = 5 * 1024 * 1024
# An executor makes those of a prompt in one go: 2 MiB take it half a second, in which it reports nothing.
MAX_PROMPT_LOGPROBS_BYTES = 2 * 1024 * 1024
MAX_ECHO_BYTES = 2 * 1024 * 1024


def check_labels(request: inference_pb2.GenerateRequest) -> None:
    """request_id, session_id, cache_salt and priority."""
    for field in ("request_id", "session_id", "cache_salt"):
        text: str = getattr(request, field)
        if len(text) > MAX_LABEL_CHARS:
            raise InvalidRequest(field, f"has {len(text)} characters, at most {MAX_LABEL_CHARS} are allowed")
        if not text.isprintable():
            raise InvalidRequest(field, "must be of printable characters")
    if abs(request.priority) > MAX_PRIORITY:
        raise InvalidRequest("priority", _range(request.priority, -MAX_PRIORITY, MAX_PRIORITY))


def check_prompt_form(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> None:
    """That there is a prompt; what is in it shows when it is tokenized."""
    if request.HasField("adapter") and not request.adapter:
        raise InvalidRequest("adapter", "is empty; leave it unset for the base model")
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt", "is missing")
    if kind == "chat":
        _check_chat(request.chat)


def _check_chat(chat: inference_pb2.Chat) -> None:
    if not 1 <= len(chat.messages) <= MAX_CHAT_MESSAGES:
        raise InvalidRequest("chat.messages", f"needs 1 to {MAX_CHAT_MESSAGES}, has {len(chat.messages)}")
    for index, message in enumerate(chat.messages):
        if not (message.role.isprintable() and 1 <= len(message.role) <= MAX_ROLE_CHARS):
            raise InvalidRequest(
                f"chat.messages[{index}].role", f"needs 1 to {MAX_ROLE_CHARS} printable characters"
            )


def check_token_ids(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    if max(token_ids, default=0) < vocab_size:
        return
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"{field}[{index}]", f"{token_id} is not below the vocabulary's {vocab_size}"
            )


def check_sampling(sampling: common_pb2.Sampling, vocab_size: int) -> None:
    prefix = "sampling"
    _check_float(sampling.temperature, f"{prefix}.temperature", 0, 100)
    _check_float(sampling.min_p, f"{prefix}.min_p", 0, 1)
    _check_float(sampling.presence_penalty, f"{prefix}.presence_penalty", -10, 10)
    _check_float(sampling.frequency_penalty, f"{prefix}.frequency_penalty", -10, 10)
    if sampling.HasField("top_p"):
        _check_float(sampling.top_p, f"{prefix}.top_p", 0, 1, above=True)
    if sampling.HasField("repetition_penalty"):
        _check_float(sampling.repetition_penalty, f"{prefix}.repetition_penalty", 0, 10, above=True)
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidRequest(
            f"{prefix}.logit_bias", f"has {len(sampling.logit_bias)} entries, at most {MAX_LOGIT_BIASES}"
        )
    for token_id, bias in sampling.logit_bias.items():
        field = f"{prefix}.logit_bias[{token_id}]"
        if token_id >= vocab_size:
            raise InvalidRequest(field, f"is not below the vocabulary's {vocab_size}")
        _check_float(bias, field, -100, 100)


def _check_float(value: float, field: str, low: float, high: float, *, above: bool = False) -> None:
    """`above`: the lower end itself is not allowed. NaN is in no range."""
    if math.isnan(value) or not low <= value <= high or (above and value == low):
        raise InvalidRequest(field, _range(value, low, high, above=above))


def _range(value: float, low: float, high: float, *, above: bool = False) -> str:
    return f"{value:g} is not in {'(' if above else '['}{low:g}, {high:g}]"


def check_stopping(stopping: common_pb2.Stopping, vocab_size: int) -> None:
    """All that does not depend on the prompt's length."""
    if stopping.HasField("max_new_tokens"):
        if stopping.max_new_tokens < 1:
            raise InvalidRequest("stopping.max_new_tokens", "must be at least 1; unset is the model's length")
        if stopping.min_new_tokens > stopping.max_new_tokens:
            raise InvalidRequest(
                "stopping.min_new_tokens",
                f"{stopping.min_new_tokens} is more than max_new_tokens, {stopping.max_new_tokens}",
            )
    if len(stopping.stop_sequences) > MAX_STOP_SEQUENCES:
        raise InvalidRequest(
            "stopping.stop_sequences", f"has {len(stopping.stop_sequences)}, at most {MAX_STOP_SEQUENCES}"
        )
    for index, text in enumerate(stopping.stop_sequences):
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequest(
                f"stopping.stop_sequences[{index}]",
                f"has {len(text)} characters, needs 1 to {MAX_STOP_CHARS}",
            )
    if len(stopping.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(
            "stopping.stop_token_ids", f"has {len(stopping.stop_token_ids)}, at most {MAX_STOP_TOKENS}"
        )
    check_token_ids(stopping.stop_token_ids, vocab_size, "stopping.stop_token_ids")


def check_response(response: inference_pb2.ResponseOptions) -> None:
    for field in ("logprobs", "prompt_logprobs"):
        count: int = getattr(response, field)
        if count > MAX_LOGPROBS:
            raise InvalidRequest(f"response.{field}", f"{count} is more than {MAX_LOGPROBS}")


def check_prompt_logprobs(response: inference_pb2.ResponseOptions, prompt_tokens: int) -> None:
    """That they fit into one message, in which they travel from the executor and to the client."""
    if response.HasField("prompt_logprobs"):
        most = MAX_PROMPT_LOGPROBS_BYTES // _position_bytes(response.prompt_logprobs)
        if prompt_tokens > most:
            raise InvalidRequest(
                "response.prompt_logprobs",
                f"the prompt has {prompt_tokens} tokens; with {response.prompt_logprobs} alternatives each, "
                f"at most {most} fit into a message",
            )


def check_fits_one_message(response: inference_pb2.ResponseOptions, stopping: common_pb2.Stopping) -> None:
    """For an answer that is sent whole. `stopping` is the completed one."""
    if response.HasField("logprobs"):
        most = MAX_LOGPROBS_BYTES // _position_bytes(response.logprobs)
        if stopping.max_new_tokens > most:
            raise InvalidRequest(
                "response.logprobs",
                f"the answer may have {stopping.max_new_tokens} tokens; with {response.logprobs} "
                f"alternatives each, at most {most} fit into a message: set stopping.max_new_tokens, or use "
                "GenerateStream",
            )


def check_echo(text: str) -> None:
    if (size := len(text.encode())) > MAX_ECHO_BYTES:
        raise InvalidRequest(
            "response.echo", f"the prompt's text has {size} bytes, at most {MAX_ECHO_BYTES} are sent back"
        )


def _position_bytes(alternatives: int) -> int:
    """The most that a PositionLogprobs takes in a list: 13 for each token, with a tag and a length of 2."""
    return 13 * (alternatives + 1) + 3


def complete_stopping(
    stopping: common_pb2.Stopping, prompt_tokens: int, max_model_len: int
) -> common_pb2.Stopping:
    """A copy whose max_new_tokens is set and fits the model's length, at which an answer ends anyway."""
    room = max_model_len - prompt_tokens
    if room < 1:
        raise InvalidRequest(
            "prompt",
            f"has {prompt_tokens} tokens; the model takes {max_model_len} for prompt and answer together",
        )
    if stopping.min_new_tokens > room:
        raise InvalidRequest(
            "stopping.min_new_tokens",
            f"{stopping.min_new_tokens} do not fit: the prompt has {prompt_tokens} tokens, the model takes "
            f"{max_model_len} in all",
        )
    completed = common_pb2.Stopping()
    completed.CopyFrom(stopping)
    wanted = stopping.max_new_tokens if stopping.HasField("max_new_tokens") else room
    completed.max_new_tokens = min(wanted, room)
    return completed


def check_resume(
    request: inference_pb2.GenerateRequest, stopping: common_pb2.Stopping, vocab_size: int
) -> tuple[int, ...]:
    """The tokens that the client has. `stopping` is the completed one: its limit counts them too."""
    if not request.HasField("resume"):
        return ()
    resume = request.resume
    if request.sampling.HasField("seed") and request.sampling.seed != resume.seed:
        raise InvalidRequest("resume.seed", "is not the seed in sampling")
    if len(resume.output_token_ids) > stopping.max_new_tokens:
        raise InvalidRequest(
            "resume.output_token_ids",
            f"has {len(resume.output_token_ids)} tokens, the answer at most {stopping.max_new_tokens}",
        )
    check_token_ids(resume.output_token_ids, vocab_size, "resume.output_token_ids")
    return tuple(resume.output_token_ids)
