"""What a request asks of the sampler, and what it gets. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request draws; the defaults draw from the plain distribution. ValueError names a bad field."""

    temperature: float = 1.0  # 0: the likeliest token
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off; over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    seed: int = 0  # 64 bits, unsigned
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    masked_logprobs: bool = False  # among the tokens that the answer's guide leaves
    logprobs: int | None = None  # how many of the likeliest tokens to report beside the chosen one

    def __post_init__(self) -> None:
        self._require("temperature", 0 <= self.temperature < math.inf, "at least 0 and finite")
        self._require("top_k", self.top_k >= 0, "at least 0")
        self._require("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        self._require("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        self._require("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0 and finite")
        self._require("presence_penalty", math.isfinite(self.presence_penalty), "finite")
        self._require("frequency_penalty", math.isfinite(self.frequency_penalty), "finite")
        self._require("seed", 0 <= self.seed < 2**64, "an unsigned 64-bit number")
        biases_fit = all(token >= 0 and math.isfinite(bias) for token, bias in self.logit_bias)
        self._require("logit_bias", biases_fit, "pairs of a token id and a finite number")
        self._require("logprobs", self.logprobs is None or self.logprobs >= 0, "None or at least 0")

    def _require(self, field: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ValueError(f"{field} must be {wanted}, not {getattr(self, field)!r}")

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A row of logits from which a token is drawn."""

    params: SamplingParams
    position: int  # of the token that is drawn: len(prompt) + len(output), with a pending one
    prompt_token_ids: Sequence[int]  # this and the next one are empty unless params.penalizes
    output_token_ids: Sequence[int]
    forbidden_token_ids: Sequence[int] = ()  # EOS and stop ids while min_new_tokens is not reached
    pending: int = -1  # row of the last tokens with one more output token; -1: there is none

    @property
    def reports(self) -> int | None:
        return self.params.logprobs


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A row of logits of which the log-probability of a known token is wanted, and those of the `reports`
    likeliest ones."""

    token_id: int
    reports: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """`logprob` is of the model's own distribution: before biases, penalties and temperature, and before
    masks unless `masked_logprobs`. NaN unless it was asked for."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the `logprobs` likeliest (token, log-probability), best first


class SampleFailure(Enum):
    """Why nothing can be drawn for this sequence; its neighbours in the step are fine."""

    NOT_FINITE = "the model's logits are not finite"
    NOTHING_LEFT = "biases, penalties and forbidden tokens leave nothing to draw"  # the request's own doing


Row = SampleRequest | ScoreRequest
Outcome = SampledToken | SampleFailure
