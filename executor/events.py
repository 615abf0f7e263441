"""What the engine tells after each step: new tokens, ends, rejections, residency and its status."""

from dataclasses import dataclass

from executor.adapters.drops import DropKey
from executor.adapters.residency import ResidencyDelta
from executor.batch.rates import UNKNOWN, Rates
from executor.batch.sampling import SampledToken
from executor.batch.sequence import FinishReason, Key, PromptLogprob
from executor.rejection import Rejection


@dataclass(frozen=True, slots=True)
class NewToken:
    """One token of one sequence; `prompt_scores` comes once, with the first, when they were asked for."""

    key: Key
    output_index: int
    token: SampledToken
    wants_logprobs: bool
    prompt_scores: tuple[PromptLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    key: Key
    reason: FinishReason
    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Rejected:
    key: Key
    rejection: Rejection


@dataclass(frozen=True, slots=True)
class Status:
    """Where the engine stands. `waiting` sequences have not had their first step."""

    draining: bool = False
    running: int = 0
    waiting: int = 0
    free_seats: int = 0
    free_kv_blocks: int = 0
    free_slots: int = 0
    slots_in_use: int = 0
    loading: int = 0
    host_bytes: int = 0
    running_by_digest: tuple[tuple[str, int], ...] = ()
    waiting_by_digest: tuple[tuple[str, int], ...] = ()
    rates: Rates = UNKNOWN


@dataclass(frozen=True, slots=True)
class StepEvents:
    """`ran`: a forward pass is over, number `step`. Ends and residency can be there without one. `runs`: the
    next one is under way, with events to come. `dropped`: these are done, and `residency` or one before it
    says what is left."""

    step: int
    ran: bool
    runs: bool
    tokens: tuple[NewToken, ...]
    finished: tuple[Finished, ...]
    rejected: tuple[Rejected, ...]
    residency: ResidencyDelta | None
    status: Status
    dropped: tuple[DropKey, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is fixed for an engine's life."""

    model_name: str
    model_dtype: str  # a name in torch
    model_fingerprint: str
    max_model_len: int
    max_rank: int
    modules: tuple[str, ...]
    max_loras: int
    max_seats: int
    num_kv_blocks: int
    block_size: int
    max_full_heads: int = 0
    knows_constraints: bool = False
