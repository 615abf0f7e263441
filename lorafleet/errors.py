"""The errors that a call of the client can raise.

LoraFleetError
├── InvalidRequest        INVALID_ARGUMENT: a field or file is wrong; `violations` names each. reason
│                         WARNINGS_REFUSED: a strict push of what would be taken with these warnings
├── AdapterNotFound       NOT_FOUND: no such adapter, alias or version, or not for this caller
├── PermissionDenied      PERMISSION_DENIED: a right is missing
├── Unauthenticated       UNAUTHENTICATED: no token, or one that is not known
├── IncompatibleAdapter   FAILED_PRECONDITION: made for another base, too large for a slot, in use, or removed
├── QueueFull             RESOURCE_EXHAUSTED: queue or quota is full; `retry_after` says when to come again.
│                         reason QUEUE_TOO_LONG: it would wait for longer than the server lets it
├── Unavailable           UNAVAILABLE: no server, no executor or no store at the moment. metadata["tls"]
│                         names what is wrong when TLS is why (lorafleet/tls/trouble.py)
├── DeadlineExceeded      DEADLINE_EXCEEDED: the answer did not come within `timeout`. reason
│                         DEADLINE_UNREACHABLE: it would not, and was refused at once; metadata["estimate_s"]
│                         says what it would take, and `retry_after` when to come again
├── DataLoss              DATA_LOSS: stored bytes do not match their digest
├── Aborted               ABORTED: superseded by a newer call, or the alias was moved by someone else
├── Cancelled             CANCELLED: the client was closed (reason CLIENT_CLOSED), or did not read
│                         (SLOW_CLIENT), or the call was dropped on its way (no reason)
└── InternalError         INTERNAL, UNKNOWN: a bug; the message holds an id that is in the server's log.
                          Without a reason, the call broke on its way

A code that is not listed raises LoraFleetError itself, as UNIMPLEMENTED does: with reason
CONSTRAINTS_UNSUPPORTED no executor takes constraints, or none can for this model.

LaunchError               services could not be started on this machine (lorafleet/local.py)
└── ServiceEnded          one of them ended by itself; `status` is its exit status
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from lorafleet.v1 import common_pb2

_DETAILS_KEY = "grpc-status-details-bin"
ACCEPTED = ("lorafleet-accepted", "true")
"""Metadata that a server begins a stream with, and that a call which asks for the same answer again has."""
REQUEST_ID = "lorafleet-request-id"
"""Metadata of a call: the request's own id, by which it is known before anything of it is read."""
ANSWER_ID = "lorafleet-answer-id"
"""Beside it, the server's own name for the answer."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One wrong field: its path, as "sampling.top_p", and what is allowed.

    reason: stable and machine-readable where one error has several, as "OTHER_BASE_MODEL"; else empty.
    """

    field: str
    description: str
    reason: str = ""


class LoraFleetError(Exception):
    """A call that failed.

    code: the gRPC status. reason: stable and machine-readable, as "ADAPTER_NOT_FOUND"; empty when the status
    comes from the network and not from a server of ours. metadata: what it is about, as {"adapter": ...}.
    retry_after: seconds to wait before the next try, when the server named them.
    violations: the wrong fields, for InvalidRequest only. accepted: a server had accepted the request before,
    and had named its answer answer_id, if it names any.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
        violations: Sequence[Violation] = (),
        accepted: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_after = retry_after
        self.violations = tuple(violations)
        self.accepted = accepted
        self.answer_id = ""

    @property
    def is_lost_connection(self) -> bool:
        """The call ended without a word of a server of ours, which names a reason for each of its errors.

        gRPC ends a call as CANCELLED that its server does not take up in time, and as INTERNAL or UNKNOWN
        one that breaks off otherwise than by a closed connection."""
        return not self.reason and isinstance(self, Unavailable | Cancelled | InternalError)

    def __reduce__(self) -> tuple[Any, ...]:
        """The form for pickle, which calls the class with the message alone; pools of processes raise ours,
        too."""
        return type(self), (self.code, self.message), vars(self)


class InvalidRequest(LoraFleetError):
    pass


class AdapterNotFound(LoraFleetError):
    pass


class PermissionDenied(LoraFleetError):
    pass


class Unauthenticated(LoraFleetError):
    pass


class IncompatibleAdapter(LoraFleetError):
    pass


class QueueFull(LoraFleetError):
    pass


class Unavailable(LoraFleetError):
    pass


class DeadlineExceeded(LoraFleetError):
    pass


class DataLoss(LoraFleetError):
    pass


class Aborted(LoraFleetError):
    pass


class Cancelled(LoraFleetError):
    pass


class InternalError(LoraFleetError):
    pass


_BY_CODE: Mapping[grpc.StatusCode, type[LoraFleetError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: AdapterNotFound,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.FAILED_PRECONDITION: IncompatibleAdapter,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFull,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.DATA_LOSS: DataLoss,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.UNKNOWN: InternalError,
}


def invalid(field: str, description: str) -> InvalidRequest:
    """The error for a field that is found wrong before anything is sent."""
    return InvalidRequest(
        grpc.StatusCode.INVALID_ARGUMENT,
        f"{field}: {description}",
        reason="INVALID_REQUEST",
        violations=[Violation(field, description)],
    )


def from_call(call: grpc.RpcError) -> LoraFleetError:
    """The typed error of a failed call, sync or asyncio, with what its metadata tell."""
    trailing = dict(call.trailing_metadata() or ())
    told = {**dict(call.initial_metadata() or ()), **trailing}
    error = from_status(call.code(), call.details() or "", trailing.get(_DETAILS_KEY, b""))
    error.accepted = ACCEPTED[0] in told
    error.answer_id = str(told.get(ANSWER_ID, ""))
    return error


def from_status(code: grpc.StatusCode, message: str, details: bytes) -> LoraFleetError:
    """details: a serialized google.rpc.Status, or empty. Unreadable ones (a proxy's) are left out."""
    error = _BY_CODE.get(code, LoraFleetError)(code, message)
    with suppress(DecodeError):
        for detail in common_pb2.ErrorStatus.FromString(details).details:
            _add_detail(error, detail.type_url.rpartition("/")[2], detail.value)
    return error


def _add_detail(error: LoraFleetError, kind: str, value: bytes) -> None:
    match kind:
        case "google.rpc.ErrorInfo":
            info = common_pb2.ErrorInfo.FromString(value)
            error.reason, error.metadata = info.reason, dict(info.metadata)
        case "google.rpc.RetryInfo":
            delay = common_pb2.RetryInfo.FromString(value).retry_delay
            error.retry_after = delay.seconds + delay.nanos / 1e9
        case "google.rpc.BadRequest":
            found = common_pb2.BadRequest.FromString(value).field_violations
            error.violations += tuple(Violation(v.field, v.description, v.reason) for v in found)


class LaunchError(Exception):
    """One line that says what is wrong and what to do."""


class ServiceEnded(LaunchError):
    """A service ended although nobody stopped it; `status` is its exit status, 128 + n after signal n."""

    def __init__(self, name: str, returncode: int, last_line: str) -> None:
        self.status = 128 - returncode if returncode < 0 else returncode
        super().__init__(f"{name} ended with status {self.status}: {last_line or 'it logged nothing'}")
