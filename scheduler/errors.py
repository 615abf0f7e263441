"""What can go wrong in the scheduler, and how a client sees it.

SchedulerError
├── InvalidRequest       INVALID_ARGUMENT      a field, ref, file or tensor is wrong; names it
├── WarningsRefused      INVALID_ARGUMENT      a strict push of what would be taken with warnings; names each
├── Unauthenticated      UNAUTHENTICATED       no or an unknown token
├── PermissionDenied     PERMISSION_DENIED     a right is missing on something the caller may see
├── AdapterNotFound      NOT_FOUND             unknown, or not the caller's to see: the same text for both
├── IncompatibleAdapter  FAILED_PRECONDITION   wrong base, more rank or modules than a slot holds
├── NoConstraints        UNIMPLEMENTED         no executor, or not this model, takes constraints
├── InUse                FAILED_PRECONDITION   an alias or a protection points at it
├── AdapterRemoved       FAILED_PRECONDITION   it was removed at once, requests in flight included
├── PushedAgain          ABORTED               what was to be drained takes requests again
├── GenerationMismatch   ABORTED               an alias has moved since the caller looked
├── Superseded           ABORTED               a second call took this request id
├── QueueFull            RESOURCE_EXHAUSTED    with a retry delay
├── TooManyStreams       RESOURCE_EXHAUSTED    a tenant has as many requests as it may: with a retry delay
├── RateExceeded         RESOURCE_EXHAUSTED    a tenant's rate, named by the reason: with a retry delay
├── TenantFull           RESOURCE_EXHAUSTED    a tenant has as many versions as it may: with a retry delay
├── TooMuchHeld          RESOURCE_EXHAUSTED    a tenant, or all, have as much as they may of what is shared
├── NoExecutor           UNAVAILABLE           with a retry delay
├── StoreUnavailable     UNAVAILABLE           with a retry delay
├── Draining             UNAVAILABLE           with a retry delay
├── LedgerUnavailable    UNAVAILABLE           its usage could not be recorded: with a retry delay
├── QueueTooLong         RESOURCE_EXHAUSTED    it would wait above --max-queue-time: with a retry delay
├── DeadlineExceeded     DEADLINE_EXCEEDED
├── SlowTransfer         DEADLINE_EXCEEDED     a push or a pull brings, or takes, too little for too long
├── DeadlineUnreachable  DEADLINE_EXCEEDED     refused at once, as it would come too late: with a retry delay
├── SlowClient           CANCELLED             the client stopped reading
├── DataLoss             DATA_LOSS             stored bytes fail their digest
├── ExecutorFailed       as the executor says
├── AtTheDoor            as lorafleet/doors/refusals.py says
└── InternalError        INTERNAL              a bug; the log has its id
"""

import functools
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import grpc

import adapter_store.errors as store
from lorafleet.doors import Refused

logger = logging.getLogger(__name__)


class Violation(NamedTuple):
    """`field` is its path in the request. `reason`: stable, where one error has several; else empty."""

    field: str
    description: str
    reason: str = ""


class SchedulerError(Exception):
    """A failure with everything a client may know of it.

    `reason` is stable and machine-readable; `metadata` says what it is about; `violations` are the wrong
    fields; `retry_after_s` is a hint in seconds, None when a retry cannot help.
    """

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    reason: str = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        violations: tuple[Violation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata: dict[str, str] = dict(metadata or {})
        self.violations = violations
        self.retry_after_s = retry_after_s


class InvalidRequest(SchedulerError):
    """`field` is the path in the request, for example "sampling.top_p"."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    def __init__(self, field: str, description: str) -> None:
        super().__init__(
            f"{field}: {description}",
            metadata={"field": field},
            violations=(Violation(field, description),),
        )


class WarningsRefused(SchedulerError):
    """A violation has each warning's reason and message."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "WARNINGS_REFUSED"

    def __init__(self, refused: store.WarningsRefused) -> None:
        super().__init__(
            f"adapter: {refused}",
            metadata={"field": "adapter"},
            violations=tuple(Violation("adapter", message, reason) for reason, message in refused.warnings),
        )


class Unauthenticated(SchedulerError):
    """`cause` is for the audit log and its metric, and is not told to the caller."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"

    def __init__(self, message: str, *, cause: str = "no_token") -> None:
        super().__init__(message)
        self.cause = cause


class PermissionDenied(SchedulerError):
    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class AdapterNotFound(SchedulerError):
    """`adapter` is the ref as the caller wrote it, so that the text tells nothing about other tenants."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "ADAPTER_NOT_FOUND"

    def __init__(self, adapter: str) -> None:
        super().__init__(f"there is no adapter {adapter!r}", metadata={"adapter": adapter})


class IncompatibleAdapter(SchedulerError):
    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "INCOMPATIBLE_ADAPTER"


class NoConstraints(SchedulerError):
    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "CONSTRAINTS_UNSUPPORTED"


class InUse(SchedulerError):
    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "IN_USE"


class AdapterRemoved(SchedulerError):
    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "ADAPTER_REMOVED"

    def __init__(self, adapter: str, digest: str) -> None:
        super().__init__(
            f"{adapter}@{digest} was removed while this request ran",
            metadata={"adapter": adapter, "digest": digest},
        )


class PushedAgain(SchedulerError):
    code = grpc.StatusCode.ABORTED
    reason = "PUSHED_AGAIN"

    def __init__(self, adapter: str, digest: str) -> None:
        super().__init__(
            f"{adapter}@{digest} was pushed again or activated while it was drained, so it is active",
            metadata={"adapter": adapter, "digest": digest},
        )


class GenerationMismatch(SchedulerError):
    code = grpc.StatusCode.ABORTED
    reason = "GENERATION_MISMATCH"


class Superseded(SchedulerError):
    code = grpc.StatusCode.ABORTED
    reason = "SUPERSEDED"

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"a newer call uses the request id {request_id!r}", metadata={"request_id": request_id}
        )


class RetryableError(SchedulerError):
    """Never raised itself: what may succeed when it is tried again after a delay."""

    default_retry_s: ClassVar[float] = 1.0

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(
            message, retry_after_s=self.default_retry_s if retry_after_s is None else retry_after_s
        )


class QueueFull(RetryableError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class TooManyStreams(RetryableError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "TOO_MANY_STREAMS"

    def __init__(self, tenant: str, held: int, retry_after_s: float) -> None:
        super().__init__(
            f"tenant {tenant!r} has {held} requests, as many as it may have at once (max_streams)",
            retry_after_s=retry_after_s,
        )


class RateExceeded(RetryableError):
    """`reason` is one of scheduler/tenants/rates.py."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, tenant: str, reason: str, retry_after_s: float) -> None:
        super().__init__(
            f"tenant {tenant!r} has used up its rate of {_RATES[reason]}: come again in "
            f"{retry_after_s:.1f} s, with the same request id",
            retry_after_s=retry_after_s,
        )
        self.reason = reason


_RATES = {
    "REQUEST_RATE": "requests (requests_per_minute)",
    "PROMPT_TOKEN_RATE": "prompt tokens (prompt_tokens_per_minute)",
    "OUTPUT_TOKEN_RATE": "output tokens (output_tokens_per_minute)",
}


class TenantFull(RetryableError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "TENANT_FULL"
    default_retry_s = 60.0  # Until `gc` may have taken some.


class TooMuchHeld(RetryableError):
    """`reason` says of what: a stable one of its own for each thing that is shared."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, reason: str, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason


class NoExecutor(RetryableError):
    code = grpc.StatusCode.UNAVAILABLE
    reason = "NO_EXECUTOR"


class StoreUnavailable(RetryableError):
    code = grpc.StatusCode.UNAVAILABLE
    reason = "STORE_UNAVAILABLE"


class Draining(RetryableError):
    code = grpc.StatusCode.UNAVAILABLE
    reason = "DRAINING"

    def __init__(
        self, message: str = "this server is shutting down", *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class LedgerUnavailable(RetryableError):
    """UNAVAILABLE, as another scheduler may well serve it: nothing of the caller's is exhausted."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "LEDGER_UNAVAILABLE"

    def __init__(self) -> None:
        super().__init__("this server cannot record what is used, so it takes no new requests")


class DeadlineExceeded(SchedulerError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class SlowTransfer(SchedulerError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "SLOW_TRANSFER"


class QueueTooLong(RetryableError):
    """Refused for the wait that is expected before it starts. Times are in seconds."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_TOO_LONG"

    def __init__(self, wait_s: float, limit_s: float, retry_after_s: float) -> None:
        super().__init__(
            f"it would wait for about {wait_s:.1f} s, and may for {limit_s:g} s (--max-queue-time)",
            retry_after_s=retry_after_s,
        )
        self.metadata = {"estimate_s": f"{wait_s:.3f}", "limit_s": f"{limit_s:g}"}


class DeadlineUnreachable(SchedulerError):
    """Refused for what it is expected to take until its last token. Times are in seconds. The code is that of
    a deadline that passed, which clients do not try again by themselves."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_UNREACHABLE"

    def __init__(self, expected_s: float, deadline_s: float, retry_after_s: float) -> None:
        super().__init__(
            f"it would take about {expected_s:.1f} s, and has {deadline_s:.1f} s: refused before it began",
            metadata={"estimate_s": f"{expected_s:.3f}", "deadline_s": f"{deadline_s:.3f}"},
            retry_after_s=retry_after_s,
        )


class SlowClient(SchedulerError):
    code = grpc.StatusCode.CANCELLED
    reason = "SLOW_CLIENT"


class DataLoss(SchedulerError):
    code = grpc.StatusCode.DATA_LOSS
    reason = "DATA_LOSS"


class ExecutorFailed(SchedulerError):
    """An executor gave a request up for good; code, reason and message are the executor's."""

    def __init__(
        self, code: grpc.StatusCode, reason: str, message: str, about: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, metadata=about)
        self.code = code
        self.reason = reason


class AtTheDoor(SchedulerError):
    """A call that nothing of the scheduler's has seen."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(str(refused), retry_after_s=refused.retry_after_s)
        self.code = refused.code
        self.reason = refused.reason


class InternalError(SchedulerError):
    """A bug. `error_id` is in the log beside the traceback; the client learns nothing else."""

    def __init__(self, error_id: str) -> None:
        super().__init__(f"internal error {error_id}", metadata={"error_id": error_id})


def from_exception(error: Exception) -> SchedulerError:
    """The error as a client may see it. Unknown exceptions are logged here, with the id the client gets."""
    if isinstance(error, SchedulerError):
        return error
    if isinstance(error, Refused):
        return AtTheDoor(error)
    if isinstance(error, store.WarningsRefused):
        return WarningsRefused(error)
    for kind, make in _STORE_ERRORS:
        if isinstance(error, kind):
            return make(str(error))
    error_id = uuid.uuid4().hex[:16]
    logger.error("internal error %s", error_id, exc_info=error)
    return InternalError(error_id)


# Of which the text tells all. First match wins. AdapterNotFound is here for completeness: whoever knows the
# ref as the caller wrote it raises ours instead, so that the text is the same for unknown and for invisible
# adapters.
_STORE_ERRORS: tuple[tuple[type[Exception], Callable[[str], SchedulerError]], ...] = (
    (store.AdapterNotFound, AdapterNotFound),
    (store.InvalidRef, functools.partial(InvalidRequest, "adapter")),
    (store.InvalidAdapter, functools.partial(InvalidRequest, "adapter")),
    (store.IncompatibleAdapter, IncompatibleAdapter),
    (store.InUse, InUse),
    (store.TenantFull, TenantFull),
    (store.GenerationMismatch, GenerationMismatch),
    (store.DataLoss, DataLoss),
    (store.StoreUnavailable, StoreUnavailable),
)
