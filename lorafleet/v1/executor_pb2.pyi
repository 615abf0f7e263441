from lorafleet.v1 import adapters_pb2 as _adapters_pb2
from lorafleet.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOAD_STATE_UNSPECIFIED: _ClassVar[LoadState]
    LOAD_STATE_READY: _ClassVar[LoadState]
    LOAD_STATE_DRAINING: _ClassVar[LoadState]
LOAD_STATE_UNSPECIFIED: LoadState
LOAD_STATE_READY: LoadState
LOAD_STATE_DRAINING: LoadState

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Dispatch(_message.Message):
    __slots__ = ("dispatch_id", "request_id", "digest", "prompt_token_ids", "output_token_ids", "sampling", "stopping", "cache_salt", "time_left_ms", "logprobs", "prompt_logprobs", "waited_ms", "adapter", "constraint", "allowed_token_ids", "bad_words", "masked_logprobs")
    DISPATCH_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MASKED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    dispatch_id: str
    request_id: str
    digest: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.Sampling
    stopping: _common_pb2.Stopping
    cache_salt: bytes
    time_left_ms: int
    logprobs: int
    prompt_logprobs: int
    waited_ms: int
    adapter: str
    constraint: _common_pb2.Constraint
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    masked_logprobs: bool
    def __init__(self, dispatch_id: _Optional[str] = ..., request_id: _Optional[str] = ..., digest: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., stopping: _Optional[_Union[_common_pb2.Stopping, _Mapping]] = ..., cache_salt: _Optional[bytes] = ..., time_left_ms: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., waited_ms: _Optional[int] = ..., adapter: _Optional[str] = ..., constraint: _Optional[_Union[_common_pb2.Constraint, _Mapping]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., masked_logprobs: bool = ...) -> None: ...

class DispatchBatch(_message.Message):
    __slots__ = ("dispatches",)
    DISPATCHES_FIELD_NUMBER: _ClassVar[int]
    dispatches: _containers.RepeatedCompositeFieldContainer[Dispatch]
    def __init__(self, dispatches: _Optional[_Iterable[_Union[Dispatch, _Mapping]]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("dispatch_ids",)
    DISPATCH_IDS_FIELD_NUMBER: _ClassVar[int]
    dispatch_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, dispatch_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Prefetch(_message.Message):
    __slots__ = ("digest", "need_by_ms", "expected_uses", "waiting_ms", "lasts_ms")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NEED_BY_MS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_USES_FIELD_NUMBER: _ClassVar[int]
    WAITING_MS_FIELD_NUMBER: _ClassVar[int]
    LASTS_MS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    need_by_ms: int
    expected_uses: int
    waiting_ms: int
    lasts_ms: int
    def __init__(self, digest: _Optional[str] = ..., need_by_ms: _Optional[int] = ..., expected_uses: _Optional[int] = ..., waiting_ms: _Optional[int] = ..., lasts_ms: _Optional[int] = ...) -> None: ...

class PinAdapter(_message.Message):
    __slots__ = ("digest", "tier", "adapter")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    digest: str
    tier: _adapters_pb2.ResidencyTier
    adapter: str
    def __init__(self, digest: _Optional[str] = ..., tier: _Optional[_Union[_adapters_pb2.ResidencyTier, str]] = ..., adapter: _Optional[str] = ...) -> None: ...

class UnpinAdapter(_message.Message):
    __slots__ = ("digest", "adapter")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    digest: str
    adapter: str
    def __init__(self, digest: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class DropAdapter(_message.Message):
    __slots__ = ("digest", "adapter", "number")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    digest: str
    adapter: str
    number: int
    def __init__(self, digest: _Optional[str] = ..., adapter: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class DrainExecutor(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExecutorCommand(_message.Message):
    __slots__ = ("dispatch", "cancel", "prefetch", "pin", "unpin", "drop", "drain")
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    dispatch: DispatchBatch
    cancel: Cancel
    prefetch: Prefetch
    pin: PinAdapter
    unpin: UnpinAdapter
    drop: DropAdapter
    drain: DrainExecutor
    def __init__(self, dispatch: _Optional[_Union[DispatchBatch, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., prefetch: _Optional[_Union[Prefetch, _Mapping]] = ..., pin: _Optional[_Union[PinAdapter, _Mapping]] = ..., unpin: _Optional[_Union[UnpinAdapter, _Mapping]] = ..., drop: _Optional[_Union[DropAdapter, _Mapping]] = ..., drain: _Optional[_Union[DrainExecutor, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "instance_id", "model_fingerprint", "max_model_len", "max_rank", "modules", "max_loras", "max_seats", "num_kv_blocks", "block_size", "residency", "residency_number", "max_full_heads", "tells_drops", "knows_waits", "knows_constraints")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEATS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_NUMBER_FIELD_NUMBER: _ClassVar[int]
    MAX_FULL_HEADS_FIELD_NUMBER: _ClassVar[int]
    TELLS_DROPS_FIELD_NUMBER: _ClassVar[int]
    KNOWS_WAITS_FIELD_NUMBER: _ClassVar[int]
    KNOWS_CONSTRAINTS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    instance_id: str
    model_fingerprint: str
    max_model_len: int
    max_rank: int
    modules: _containers.RepeatedScalarFieldContainer[str]
    max_loras: int
    max_seats: int
    num_kv_blocks: int
    block_size: int
    residency: _containers.RepeatedCompositeFieldContainer[ResidencyEntry]
    residency_number: int
    max_full_heads: int
    tells_drops: bool
    knows_waits: bool
    knows_constraints: bool
    def __init__(self, protocol_version: _Optional[int] = ..., instance_id: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., max_model_len: _Optional[int] = ..., max_rank: _Optional[int] = ..., modules: _Optional[_Iterable[str]] = ..., max_loras: _Optional[int] = ..., max_seats: _Optional[int] = ..., num_kv_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., residency: _Optional[_Iterable[_Union[ResidencyEntry, _Mapping]]] = ..., residency_number: _Optional[int] = ..., max_full_heads: _Optional[int] = ..., tells_drops: bool = ..., knows_waits: bool = ..., knows_constraints: bool = ...) -> None: ...

class ResidencyEntry(_message.Message):
    __slots__ = ("digest", "tier", "slot", "num_bytes", "pinned")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    digest: str
    tier: _adapters_pb2.ResidencyTier
    slot: int
    num_bytes: int
    pinned: bool
    def __init__(self, digest: _Optional[str] = ..., tier: _Optional[_Union[_adapters_pb2.ResidencyTier, str]] = ..., slot: _Optional[int] = ..., num_bytes: _Optional[int] = ..., pinned: bool = ...) -> None: ...

class ResidencyDelta(_message.Message):
    __slots__ = ("number", "added", "removed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    number: int
    added: _containers.RepeatedCompositeFieldContainer[ResidencyEntry]
    removed: _containers.RepeatedCompositeFieldContainer[ResidencyEntry]
    def __init__(self, number: _Optional[int] = ..., added: _Optional[_Iterable[_Union[ResidencyEntry, _Mapping]]] = ..., removed: _Optional[_Iterable[_Union[ResidencyEntry, _Mapping]]] = ...) -> None: ...

class Dropped(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class StepTokens(_message.Message):
    __slots__ = ("step", "dispatch_ids", "first_output_index", "token_counts", "token_ids", "logprobs", "finished")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    step: int
    dispatch_ids: _containers.RepeatedScalarFieldContainer[str]
    first_output_index: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[DispatchLogprobs]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    def __init__(self, step: _Optional[int] = ..., dispatch_ids: _Optional[_Iterable[str]] = ..., first_output_index: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[DispatchLogprobs, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ...) -> None: ...

class DispatchLogprobs(_message.Message):
    __slots__ = ("dispatch_id", "positions", "prompt_positions")
    DISPATCH_ID_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    dispatch_id: str
    positions: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    prompt_positions: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    def __init__(self, dispatch_id: _Optional[str] = ..., positions: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., prompt_positions: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("dispatch_id", "reason", "cached_prompt_tokens")
    DISPATCH_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    dispatch_id: str
    reason: _common_pb2.FinishReason
    cached_prompt_tokens: int
    def __init__(self, dispatch_id: _Optional[str] = ..., reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("dispatch_id", "message", "reason", "retryable", "code")
    DISPATCH_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    dispatch_id: str
    message: str
    reason: str
    retryable: bool
    code: int
    def __init__(self, dispatch_id: _Optional[str] = ..., message: _Optional[str] = ..., reason: _Optional[str] = ..., retryable: bool = ..., code: _Optional[int] = ...) -> None: ...

class ColdWait(_message.Message):
    __slots__ = ("digest", "waiting_ms")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WAITING_MS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    waiting_ms: int
    def __init__(self, digest: _Optional[str] = ..., waiting_ms: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("state", "free_seats", "free_kv_blocks", "free_slots", "waiting", "running", "last_step_age_ms", "received_dispatches", "cold", "token_interval_us", "tokens_per_second", "prompt_tokens_per_second", "prompt_tokens_left", "answer_tokens_left", "page_in_us", "load_us")
    STATE_FIELD_NUMBER: _ClassVar[int]
    FREE_SEATS_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_DISPATCHES_FIELD_NUMBER: _ClassVar[int]
    COLD_FIELD_NUMBER: _ClassVar[int]
    TOKEN_INTERVAL_US_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    PAGE_IN_US_FIELD_NUMBER: _ClassVar[int]
    LOAD_US_FIELD_NUMBER: _ClassVar[int]
    state: LoadState
    free_seats: int
    free_kv_blocks: int
    free_slots: int
    waiting: int
    running: int
    last_step_age_ms: int
    received_dispatches: int
    cold: _containers.RepeatedCompositeFieldContainer[ColdWait]
    token_interval_us: int
    tokens_per_second: int
    prompt_tokens_per_second: int
    prompt_tokens_left: int
    answer_tokens_left: int
    page_in_us: int
    load_us: int
    def __init__(self, state: _Optional[_Union[LoadState, str]] = ..., free_seats: _Optional[int] = ..., free_kv_blocks: _Optional[int] = ..., free_slots: _Optional[int] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., last_step_age_ms: _Optional[int] = ..., received_dispatches: _Optional[int] = ..., cold: _Optional[_Iterable[_Union[ColdWait, _Mapping]]] = ..., token_interval_us: _Optional[int] = ..., tokens_per_second: _Optional[int] = ..., prompt_tokens_per_second: _Optional[int] = ..., prompt_tokens_left: _Optional[int] = ..., answer_tokens_left: _Optional[int] = ..., page_in_us: _Optional[int] = ..., load_us: _Optional[int] = ...) -> None: ...

class ExecutorEvent(_message.Message):
    __slots__ = ("hello", "step", "finished", "rejected", "residency", "load", "dropped")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    step: StepTokens
    finished: Finished
    rejected: Rejected
    residency: ResidencyDelta
    load: Load
    dropped: Dropped
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., step: _Optional[_Union[StepTokens, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., residency: _Optional[_Union[ResidencyDelta, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., dropped: _Optional[_Union[Dropped, _Mapping]] = ...) -> None: ...
