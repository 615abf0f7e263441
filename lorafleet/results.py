"""What calls return: frozen values, made from the wire's messages by lorafleet/wire.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    adapter_digest is the version that answers, "" for the base model. answer_id is the server's own name for
    the answer, under which the usage ledger has it (up to the dot); "" from a server that gives none.
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
    answer_id: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer. adapter_digest is the version that gave it, "" for the base model; answer_id is as in
    Chunk."""

    request_id: str
    adapter_digest: str
    seed: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...]
    prompt_logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason
    usage: Usage
    answer_id: str = ""


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
class PushWarning:
    """Something odd about an adapter that was taken.

    reason: stable and machine-readable, as "OTHER_BASE_MODEL" (adapter_store/README.md lists them); "" from
    a scheduler that tells none. message: for people.
    """

    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}" if self.reason else self.message


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """Immutable content under a name. num_bytes: its tensors; created_at: seconds since 1970.

    state: "active", "draining" (new requests get AdapterNotFound) or "deleted" (and its bytes go soon).
    quarantined: its bytes were found damaged; requests get DataLoss until the content is pushed again.
    full_heads: fully trained matrices that it brings besides, of "embed_tokens" and "lm_head".
    end_token_ids: that end its answers, too, beside the base's. special_tokens: what chat templates know as
    "eos_token" and so on, where it is not the base's.
    warnings: of the last push under this name.
    """

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
    warnings: tuple[PushWarning, ...]
    aliases: tuple[str, ...]
    state: str = "active"
    quarantined: bool = False
    full_heads: tuple[str, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AdapterSummary:
    """A version in a listing; the fields are AdapterVersion's."""

    tenant: str
    name: str
    digest: str
    max_rank: int
    num_bytes: int
    base_model: str
    created_at: float
    protected: bool
    aliases: tuple[str, ...]
    state: str
    quarantined: bool


@dataclass(frozen=True, slots=True)
class AdapterAlias:
    """A movable pointer to a version; generation counts its moves, 1 at first.

    targets: weight by digest when it splits its traffic, empty otherwise; digest has the most then.
    """

    tenant: str
    name: str
    alias: str
    digest: str
    generation: int
    targets: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PushResult:
    """created: whether this content is new under this name; alias: the one that was moved, if one was."""

    version: AdapterVersion
    created: bool
    alias: AdapterAlias | None


@dataclass(frozen=True, slots=True)
class Verification:
    """How many versions were re-hashed, and what is wrong with the damaged ones, by digest.

    orphans: stored content that no version names, when all was looked at and the caller sees all adapters.
    """

    verified: int
    damaged: Mapping[str, str]
    orphans: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pinned:
    """executors keep the version, missing ones do not yet: they are away or have no room."""

    digest: str
    executors: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Freed:
    """remaining: executors that still hold a copy, because requests use it or because they are away."""

    digest: str
    remaining: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Collection:
    """What went, or would: "tenant/name@digest" of each, and the bytes of their packed files."""

    versions: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Residency:
    """One copy of a version on one executor; tier is "disk", "host" or "slot"; slot is -1 for the others.

    last_use: seconds since 1970, 0 when this scheduler never used it there. loads, evictions: how often it
    came into this tier and left it while this scheduler was connected. adapters: the caller's names for it.
    """

    executor: str
    digest: str
    tier: str
    slot: int
    running: int
    num_bytes: int
    pinned: bool
    max_rank: int = 0
    last_use: float = 0.0
    loads: int = 0
    evictions: int = 0
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Executor:
    """One executor as the scheduler sees it; `detail` says why when `state` is not "ready", or `on_trial`: it
    takes nothing new beside one request that may have crashed others, until that one's first token or end.

    slot_hits, host_hits, misses: requests sent there, by where their version was. page_in_mean, page_in_max:
    seconds from a request without a slot copy to that copy, of the last 64. in_host: copies in host memory.
    name: its pod's own where discovery found one, else its address. leaving: it is no executor of this fleet
    any more, or has moved, and ends what runs there. seat_limit: of requests while it warms up, else 0.
    tripped: it failed what it was sent, and gets nothing for a while.
    """

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
    max_seats: int = 0
    in_host: int = 0
    slot_hits: int = 0
    host_hits: int = 0
    misses: int = 0
    page_in_mean: float = 0.0
    page_in_max: float = 0.0
    on_trial: bool = False
    name: str = ""
    leaving: bool = False
    seat_limit: int = 0
    tripped: bool = False


@dataclass(frozen=True, slots=True)
class Fleet:
    """All executors, and the requests and adapter groups that wait.

    queues: the largest groups, as (digest, requests); the digest of the base model is "".
    """

    executors: tuple[Executor, ...]
    waiting: int
    groups: int
    queues: tuple[tuple[str, int], ...] = ()
