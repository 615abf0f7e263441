"""Adapters as files and versions: checked at the push, named by content, read without copies."""

from adapter_store.cached import CachedStore
from adapter_store.disk_store.store import DiskStore
from adapter_store.errors import (
    AdapterNotFound,
    AdapterStoreError,
    DataLoss,
    GenerationMismatch,
    IncompatibleAdapter,
    InUse,
    InvalidAdapter,
    InvalidModel,
    InvalidRef,
    NoStore,
    OtherFormat,
    StoreUnavailable,
    TenantFull,
    UnsafeStore,
    UploadLost,
    WarningsRefused,
)
from adapter_store.lease import Lease
from adapter_store.manifest import (
    Alias,
    Manifest,
    ModuleInfo,
    PushFacts,
    PushOptions,
    PushWarning,
    Version,
    VersionState,
)
from adapter_store.model_spec import ModelSpec
from adapter_store.module_names import is_expert, kind_of, place_of
from adapter_store.packed.form import LoRAModule, Weights
from adapter_store.record import NameRecord, News
from adapter_store.ref import Ref
from adapter_store.store import (
    AdapterStore,
    Curator,
    NoticeBoard,
    Publisher,
    Resolver,
    WeightsSource,
    open_store,
)
from adapter_store.summary import Summary

__all__ = [
    "AdapterNotFound",
    "AdapterStore",
    "AdapterStoreError",
    "Alias",
    "CachedStore",
    "Curator",
    "DataLoss",
    "DiskStore",
    "GenerationMismatch",
    "InUse",
    "IncompatibleAdapter",
    "InvalidAdapter",
    "InvalidModel",
    "InvalidRef",
    "Lease",
    "LoRAModule",
    "Manifest",
    "ModelSpec",
    "ModuleInfo",
    "NameRecord",
    "News",
    "NoStore",
    "NoticeBoard",
    "OtherFormat",
    "Publisher",
    "PushFacts",
    "PushOptions",
    "PushWarning",
    "Ref",
    "Resolver",
    "StoreUnavailable",
    "Summary",
    "TenantFull",
    "UnsafeStore",
    "UploadLost",
    "Version",
    "VersionState",
    "WarningsRefused",
    "Weights",
    "WeightsSource",
    "is_expert",
    "kind_of",
    "open_store",
    "place_of",
]
