from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VersionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERSION_STATE_UNSPECIFIED: _ClassVar[VersionState]
    VERSION_STATE_ACTIVE: _ClassVar[VersionState]
    VERSION_STATE_DRAINING: _ClassVar[VersionState]
    VERSION_STATE_DELETED: _ClassVar[VersionState]

class ResidencyTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESIDENCY_TIER_UNSPECIFIED: _ClassVar[ResidencyTier]
    RESIDENCY_TIER_DISK: _ClassVar[ResidencyTier]
    RESIDENCY_TIER_HOST: _ClassVar[ResidencyTier]
    RESIDENCY_TIER_SLOT: _ClassVar[ResidencyTier]
VERSION_STATE_UNSPECIFIED: VersionState
VERSION_STATE_ACTIVE: VersionState
VERSION_STATE_DRAINING: VersionState
VERSION_STATE_DELETED: VersionState
RESIDENCY_TIER_UNSPECIFIED: ResidencyTier
RESIDENCY_TIER_DISK: ResidencyTier
RESIDENCY_TIER_HOST: ResidencyTier
RESIDENCY_TIER_SLOT: ResidencyTier

class AdapterModule(_message.Message):
    __slots__ = ("name", "rank", "scale")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    scale: float
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ..., scale: _Optional[float] = ...) -> None: ...

class PushWarning(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class AdapterVersion(_message.Message):
    __slots__ = ("tenant", "name", "digest", "modules", "max_rank", "dtypes", "num_bytes", "base_model", "has_chat_template", "created_at_ms", "protected", "warnings", "aliases", "state", "quarantined", "full_heads", "push_warnings", "end_token_ids", "special_tokens")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    FULL_HEADS_FIELD_NUMBER: _ClassVar[int]
    PUSH_WARNINGS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    name: str
    digest: str
    modules: _containers.RepeatedCompositeFieldContainer[AdapterModule]
    max_rank: int
    dtypes: _containers.RepeatedScalarFieldContainer[str]
    num_bytes: int
    base_model: str
    has_chat_template: bool
    created_at_ms: int
    protected: bool
    warnings: _containers.RepeatedScalarFieldContainer[str]
    aliases: _containers.RepeatedScalarFieldContainer[str]
    state: VersionState
    quarantined: bool
    full_heads: _containers.RepeatedScalarFieldContainer[str]
    push_warnings: _containers.RepeatedCompositeFieldContainer[PushWarning]
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    special_tokens: _containers.ScalarMap[str, str]
    def __init__(self, tenant: _Optional[str] = ..., name: _Optional[str] = ..., digest: _Optional[str] = ..., modules: _Optional[_Iterable[_Union[AdapterModule, _Mapping]]] = ..., max_rank: _Optional[int] = ..., dtypes: _Optional[_Iterable[str]] = ..., num_bytes: _Optional[int] = ..., base_model: _Optional[str] = ..., has_chat_template: bool = ..., created_at_ms: _Optional[int] = ..., protected: bool = ..., warnings: _Optional[_Iterable[str]] = ..., aliases: _Optional[_Iterable[str]] = ..., state: _Optional[_Union[VersionState, str]] = ..., quarantined: bool = ..., full_heads: _Optional[_Iterable[str]] = ..., push_warnings: _Optional[_Iterable[_Union[PushWarning, _Mapping]]] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., special_tokens: _Optional[_Mapping[str, str]] = ...) -> None: ...

class AliasTarget(_message.Message):
    __slots__ = ("target", "weight")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    target: str
    weight: int
    def __init__(self, target: _Optional[str] = ..., weight: _Optional[int] = ...) -> None: ...

class AdapterAlias(_message.Message):
    __slots__ = ("tenant", "name", "alias", "digest", "generation", "targets")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    name: str
    alias: str
    digest: str
    generation: int
    targets: _containers.RepeatedCompositeFieldContainer[AliasTarget]
    def __init__(self, tenant: _Optional[str] = ..., name: _Optional[str] = ..., alias: _Optional[str] = ..., digest: _Optional[str] = ..., generation: _Optional[int] = ..., targets: _Optional[_Iterable[_Union[AliasTarget, _Mapping]]] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("adapter", "alias", "strict_base", "dry_run", "expected_generation", "strict", "looked_for")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    STRICT_BASE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    LOOKED_FOR_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    alias: str
    strict_base: bool
    dry_run: bool
    expected_generation: int
    strict: bool
    looked_for: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, adapter: _Optional[str] = ..., alias: _Optional[str] = ..., strict_base: bool = ..., dry_run: bool = ..., expected_generation: _Optional[int] = ..., strict: bool = ..., looked_for: _Optional[_Iterable[str]] = ...) -> None: ...

class FileChunk(_message.Message):
    __slots__ = ("name", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    chunk: FileChunk
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., chunk: _Optional[_Union[FileChunk, _Mapping]] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("version", "created", "alias")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    version: AdapterVersion
    created: bool
    alias: AdapterAlias
    def __init__(self, version: _Optional[_Union[AdapterVersion, _Mapping]] = ..., created: bool = ..., alias: _Optional[_Union[AdapterAlias, _Mapping]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    def __init__(self, adapter: _Optional[str] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("chunk", "total_bytes")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    chunk: FileChunk
    total_bytes: int
    def __init__(self, chunk: _Optional[_Union[FileChunk, _Mapping]] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class GetAdapterRequest(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    def __init__(self, adapter: _Optional[str] = ...) -> None: ...

class GetAdapterResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: AdapterVersion
    def __init__(self, version: _Optional[_Union[AdapterVersion, _Mapping]] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("name", "page_size", "page_token", "tenant", "summary", "deleted")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    name: str
    page_size: int
    page_token: str
    tenant: str
    summary: bool
    deleted: bool
    def __init__(self, name: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., tenant: _Optional[str] = ..., summary: bool = ..., deleted: bool = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("versions", "next_page_token")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[AdapterVersion]
    next_page_token: str
    def __init__(self, versions: _Optional[_Iterable[_Union[AdapterVersion, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteAdapterRequest(_message.Message):
    __slots__ = ("adapter", "force", "now")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    force: bool
    now: bool
    def __init__(self, adapter: _Optional[str] = ..., force: bool = ..., now: bool = ...) -> None: ...

class DeleteAdapterResponse(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class SetAliasRequest(_message.Message):
    __slots__ = ("adapter", "target", "expected_generation", "targets")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    target: str
    expected_generation: int
    targets: _containers.RepeatedCompositeFieldContainer[AliasTarget]
    def __init__(self, adapter: _Optional[str] = ..., target: _Optional[str] = ..., expected_generation: _Optional[int] = ..., targets: _Optional[_Iterable[_Union[AliasTarget, _Mapping]]] = ...) -> None: ...

class SetAliasResponse(_message.Message):
    __slots__ = ("alias",)
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    alias: AdapterAlias
    def __init__(self, alias: _Optional[_Union[AdapterAlias, _Mapping]] = ...) -> None: ...

class DeleteAliasRequest(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    def __init__(self, adapter: _Optional[str] = ...) -> None: ...

class DeleteAliasResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAliasesRequest(_message.Message):
    __slots__ = ("name", "tenant")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    name: str
    tenant: str
    def __init__(self, name: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ListAliasesResponse(_message.Message):
    __slots__ = ("aliases",)
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    aliases: _containers.RepeatedCompositeFieldContainer[AdapterAlias]
    def __init__(self, aliases: _Optional[_Iterable[_Union[AdapterAlias, _Mapping]]] = ...) -> None: ...

class ProtectRequest(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    def __init__(self, adapter: _Optional[str] = ...) -> None: ...

class ProtectResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: AdapterVersion
    def __init__(self, version: _Optional[_Union[AdapterVersion, _Mapping]] = ...) -> None: ...

class UnprotectRequest(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    def __init__(self, adapter: _Optional[str] = ...) -> None: ...

class UnprotectResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: AdapterVersion
    def __init__(self, version: _Optional[_Union[AdapterVersion, _Mapping]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("adapter", "tier", "executors")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    tier: ResidencyTier
    executors: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, adapter: _Optional[str] = ..., tier: _Optional[_Union[ResidencyTier, str]] = ..., executors: _Optional[_Iterable[str]] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("digest", "pinned", "missing")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    digest: str
    pinned: _containers.RepeatedScalarFieldContainer[str]
    missing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digest: _Optional[str] = ..., pinned: _Optional[_Iterable[str]] = ..., missing: _Optional[_Iterable[str]] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("adapter", "executors")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    executors: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, adapter: _Optional[str] = ..., executors: _Optional[_Iterable[str]] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class DropCopiesRequest(_message.Message):
    __slots__ = ("adapter", "executors")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    executors: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, adapter: _Optional[str] = ..., executors: _Optional[_Iterable[str]] = ...) -> None: ...

class DropCopiesResponse(_message.Message):
    __slots__ = ("digest", "remaining")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    digest: str
    remaining: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digest: _Optional[str] = ..., remaining: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainAdapterRequest(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    def __init__(self, adapter: _Optional[str] = ...) -> None: ...

class DrainAdapterResponse(_message.Message):
    __slots__ = ("digest", "unreachable")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    unreachable: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digest: _Optional[str] = ..., unreachable: _Optional[_Iterable[str]] = ...) -> None: ...

class ActivateRequest(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    def __init__(self, adapter: _Optional[str] = ...) -> None: ...

class ActivateResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: AdapterVersion
    def __init__(self, version: _Optional[_Union[AdapterVersion, _Mapping]] = ...) -> None: ...

class DeleteDamagedRequest(_message.Message):
    __slots__ = ("adapter", "dry_run")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    dry_run: bool
    def __init__(self, adapter: _Optional[str] = ..., dry_run: bool = ...) -> None: ...

class DeleteDamagedResponse(_message.Message):
    __slots__ = ("digests", "num_bytes", "adapter")
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    num_bytes: int
    adapter: str
    def __init__(self, digests: _Optional[_Iterable[str]] = ..., num_bytes: _Optional[int] = ..., adapter: _Optional[str] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    def __init__(self, adapter: _Optional[str] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("verified", "damaged", "orphans")
    class DamagedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_FIELD_NUMBER: _ClassVar[int]
    verified: int
    damaged: _containers.ScalarMap[str, str]
    orphans: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, verified: _Optional[int] = ..., damaged: _Optional[_Mapping[str, str]] = ..., orphans: _Optional[_Iterable[str]] = ...) -> None: ...

class CollectRequest(_message.Message):
    __slots__ = ("dry_run",)
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    dry_run: bool
    def __init__(self, dry_run: bool = ...) -> None: ...

class CollectResponse(_message.Message):
    __slots__ = ("digests", "num_bytes", "adapters")
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    num_bytes: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digests: _Optional[_Iterable[str]] = ..., num_bytes: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class ResidencyRequest(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    def __init__(self, adapter: _Optional[str] = ...) -> None: ...

class AdapterResidency(_message.Message):
    __slots__ = ("executor", "digest", "tier", "slot", "running", "num_bytes", "pinned", "max_rank", "last_use_ms", "loads", "evictions", "adapters")
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    LAST_USE_MS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    executor: str
    digest: str
    tier: ResidencyTier
    slot: int
    running: int
    num_bytes: int
    pinned: bool
    max_rank: int
    last_use_ms: int
    loads: int
    evictions: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, executor: _Optional[str] = ..., digest: _Optional[str] = ..., tier: _Optional[_Union[ResidencyTier, str]] = ..., slot: _Optional[int] = ..., running: _Optional[int] = ..., num_bytes: _Optional[int] = ..., pinned: bool = ..., max_rank: _Optional[int] = ..., last_use_ms: _Optional[int] = ..., loads: _Optional[int] = ..., evictions: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class ResidencyResponse(_message.Message):
    __slots__ = ("copies",)
    COPIES_FIELD_NUMBER: _ClassVar[int]
    copies: _containers.RepeatedCompositeFieldContainer[AdapterResidency]
    def __init__(self, copies: _Optional[_Iterable[_Union[AdapterResidency, _Mapping]]] = ...) -> None: ...
