"""What calls return: frozen values, made from the wire's messages by lorafleet/wire.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why an answer ended well."""

    STOP = "stop"
    """End-of-sequence token, stop token or stop sequence."""
    LENGTH = "length"
    """max_new_tokens or the model's length."""
    TIME_LIMIT = "time_limit"
    """time_limit_ms."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens spent; `cached_prompt_tokens` of the prompt's came from the prefix cache."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability, before penalties and temperature."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The token at one position (None at a prompt's first) and the most likely ones there, best first."""

    chosen: TokenLogprob | None
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer: `token_ids` begin at `output_index`, `text` is what they complete.

    finish_reason and usage are set in the last chunk only, prompt_logprobs in the first when asked for.
    adapter_digest is the version that answers, "" for the base model.
    """

    request_id: str
    adapter_digest: str
    seed: int
    output_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...]
    prompt_logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer. adapter_digest is the version that gave it, "" for the base model."""

    request_id: str
    adapter_digest: str
    seed: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...]
    prompt_logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class Tokenization:
    """A prompt as the model sees it; max_model_len bounds prompt plus answer, in tokens."""

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Model:
    """An adapter that may be named in a request: "tenant/name@alias" and the version behind it."""

    adapter: str
    digest: str
    max_rank: int


@dataclass(frozen=True, slots=True)
class Models:
    """The base model (fingerprint: sha256 over its config, tokenizer and tensor headers) and its adapters."""

    base_model: str
    fingerprint: str
    max_model_len: int
    adapters: tuple[Model, ...]


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """A module that a version changes, as "layers.0.q_proj"."""

    name: str
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """Immutable content under a name. num_bytes: its tensors; created_at: seconds since 1970."""

    tenant: str
    name: str
    digest: str
    modules: tuple[AdapterModule, ...]
    max_rank: int
    dtypes: tuple[str, ...]
    num_bytes: int
    base_model: str
    has_chat_template: bool
    created_at: float
    protected: bool
    warnings: tuple[str, ...]
    aliases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AdapterAlias:
    """A movable pointer to a version; generation counts its moves, 1 at first."""

    tenant: str
    name: str
    alias: str
    digest: str
    generation: int


@dataclass(frozen=True, slots=True)
class PushResult:
    """created: whether this content is new under this name; alias: the one that was moved, if one was."""

    version: AdapterVersion
    created: bool
    alias: AdapterAlias | None


@dataclass(frozen=True, slots=True)
class Verification:
    """How many versions were re-hashed, and what is wrong with the damaged ones, by digest."""

    verified: int
    damaged: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Residency:
    """One copy of a version on one executor; tier is "disk", "host" or "slot"; slot is -1 for the others."""

    executor: str
    digest: str
    tier: str
    slot: int
    running: int
    num_bytes: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class Executor:
    """One executor as the scheduler sees it; `detail` says why when `state` is not "ready"."""

    address: str
    state: str
    detail: str
    instance_id: str
    cordoned: bool
    running: int
    free_seats: int
    free_kv_blocks: int
    max_loras: int
    resident: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fleet:
    """All executors, and the requests and adapter groups that wait."""

    executors: tuple[Executor, ...]
    waiting: int
    groups: int
