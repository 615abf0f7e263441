from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExecutorState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXECUTOR_STATE_UNSPECIFIED: _ClassVar[ExecutorState]
    EXECUTOR_STATE_CONNECTING: _ClassVar[ExecutorState]
    EXECUTOR_STATE_READY: _ClassVar[ExecutorState]
    EXECUTOR_STATE_DRAINING: _ClassVar[ExecutorState]
    EXECUTOR_STATE_REFUSED: _ClassVar[ExecutorState]
    EXECUTOR_STATE_HUNG: _ClassVar[ExecutorState]
EXECUTOR_STATE_UNSPECIFIED: ExecutorState
EXECUTOR_STATE_CONNECTING: ExecutorState
EXECUTOR_STATE_READY: ExecutorState
EXECUTOR_STATE_DRAINING: ExecutorState
EXECUTOR_STATE_REFUSED: ExecutorState
EXECUTOR_STATE_HUNG: ExecutorState

class WatchFleetRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class ExecutorStatus(_message.Message):
    __slots__ = ("address", "state", "detail", "instance_id", "cordoned", "running", "free_seats", "free_kv_blocks", "max_loras", "resident", "slot_hits", "host_hits", "misses", "page_in_mean_ms", "page_in_max_ms", "max_seats", "in_host", "on_trial", "name", "leaving", "seat_limit", "tripped")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    CORDONED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    FREE_SEATS_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    SLOT_HITS_FIELD_NUMBER: _ClassVar[int]
    HOST_HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    PAGE_IN_MEAN_MS_FIELD_NUMBER: _ClassVar[int]
    PAGE_IN_MAX_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEATS_FIELD_NUMBER: _ClassVar[int]
    IN_HOST_FIELD_NUMBER: _ClassVar[int]
    ON_TRIAL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    SEAT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    TRIPPED_FIELD_NUMBER: _ClassVar[int]
    address: str
    state: ExecutorState
    detail: str
    instance_id: str
    cordoned: bool
    running: int
    free_seats: int
    free_kv_blocks: int
    max_loras: int
    resident: _containers.RepeatedScalarFieldContainer[str]
    slot_hits: int
    host_hits: int
    misses: int
    page_in_mean_ms: int
    page_in_max_ms: int
    max_seats: int
    in_host: int
    on_trial: bool
    name: str
    leaving: bool
    seat_limit: int
    tripped: bool
    def __init__(self, address: _Optional[str] = ..., state: _Optional[_Union[ExecutorState, str]] = ..., detail: _Optional[str] = ..., instance_id: _Optional[str] = ..., cordoned: bool = ..., running: _Optional[int] = ..., free_seats: _Optional[int] = ..., free_kv_blocks: _Optional[int] = ..., max_loras: _Optional[int] = ..., resident: _Optional[_Iterable[str]] = ..., slot_hits: _Optional[int] = ..., host_hits: _Optional[int] = ..., misses: _Optional[int] = ..., page_in_mean_ms: _Optional[int] = ..., page_in_max_ms: _Optional[int] = ..., max_seats: _Optional[int] = ..., in_host: _Optional[int] = ..., on_trial: bool = ..., name: _Optional[str] = ..., leaving: bool = ..., seat_limit: _Optional[int] = ..., tripped: bool = ...) -> None: ...

class WaitingGroup(_message.Message):
    __slots__ = ("digest", "waiting")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    digest: str
    waiting: int
    def __init__(self, digest: _Optional[str] = ..., waiting: _Optional[int] = ...) -> None: ...

class FleetSnapshot(_message.Message):
    __slots__ = ("executors", "waiting", "groups", "queues")
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    executors: _containers.RepeatedCompositeFieldContainer[ExecutorStatus]
    waiting: int
    groups: int
    queues: _containers.RepeatedCompositeFieldContainer[WaitingGroup]
    def __init__(self, executors: _Optional[_Iterable[_Union[ExecutorStatus, _Mapping]]] = ..., waiting: _Optional[int] = ..., groups: _Optional[int] = ..., queues: _Optional[_Iterable[_Union[WaitingGroup, _Mapping]]] = ...) -> None: ...

class CordonRequest(_message.Message):
    __slots__ = ("address", "cordoned")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CORDONED_FIELD_NUMBER: _ClassVar[int]
    address: str
    cordoned: bool
    def __init__(self, address: _Optional[str] = ..., cordoned: bool = ...) -> None: ...

class CordonResponse(_message.Message):
    __slots__ = ("executor",)
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    executor: ExecutorStatus
    def __init__(self, executor: _Optional[_Union[ExecutorStatus, _Mapping]] = ...) -> None: ...

class DrainExecutorRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class DrainExecutorResponse(_message.Message):
    __slots__ = ("executor",)
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    executor: ExecutorStatus
    def __init__(self, executor: _Optional[_Union[ExecutorStatus, _Mapping]] = ...) -> None: ...
