"""Logits to tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request draws. The defaults draw from the plain distribution."""

    temperature: float = 1.0  # 0: the likeliest token
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off; over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    seed: int = 0  # 64 bits
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # how many of the likeliest tokens to report beside the chosen one


@dataclass(frozen=True, slots=True)
class SampleRequest:
    params: SamplingParams
    position: int  # of the token that is drawn: len(prompt) + len(output)
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    forbidden_token_ids: Sequence[int] = ()  # EOS and stop ids while min_new_tokens is not reached


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: float  # of the model's own distribution: before biases, penalties and temperature
    top: tuple[tuple[int, float], ...]  # the `logprobs` likeliest (token, log-probability), best first


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """Nothing can be drawn for this sequence; its neighbours in the step are fine."""

    reason: str


def sample(logits: Tensor, requests: Sequence[SampleRequest]) -> list[SampledToken | SampleFailure]:
    """logits [n, vocab] float32, row i for requests[i]."""
    raise ValueError
