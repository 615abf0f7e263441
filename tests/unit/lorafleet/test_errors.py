import pickle

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

import lorafleet
from lorafleet import errors

CODES = {
    "INVALID_ARGUMENT": lorafleet.InvalidRequest,
    "NOT_FOUND": lorafleet.AdapterNotFound,
    "PERMISSION_DENIED": lorafleet.PermissionDenied,
    "UNAUTHENTICATED": lorafleet.Unauthenticated,
    "FAILED_PRECONDITION": lorafleet.IncompatibleAdapter,
    "RESOURCE_EXHAUSTED": lorafleet.QueueFull,
    "UNAVAILABLE": lorafleet.Unavailable,
    "DEADLINE_EXCEEDED": lorafleet.DeadlineExceeded,
    "DATA_LOSS": lorafleet.DataLoss,
    "ABORTED": lorafleet.Aborted,
    "CANCELLED": lorafleet.Cancelled,
    "INTERNAL": lorafleet.InternalError,
    "UNKNOWN": lorafleet.InternalError,
    "UNIMPLEMENTED": lorafleet.LoraFleetError,
}


@pytest.mark.parametrize(("name", "expected"), CODES.items())
def test_every_code_has_its_type(name: str, expected: type[Exception]) -> None:
    error = errors.from_status(grpc.StatusCode[name], "text", b"")
    assert type(error) is expected
    assert (str(error), error.code, error.reason, error.retry_after) == (
        "text",
        grpc.StatusCode[name],
        "",
        None,
    )


def google_status(*details: object) -> bytes:
    """As grpcio-status writes it on the server's side, with Google's own messages."""
    status = status_pb2.Status(code=8, message="full")
    for detail in details:
        status.details.add().Pack(detail)
    return status.SerializeToString()


def test_details_of_googles_messages_are_read() -> None:
    details = google_status(
        error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="lorafleet", metadata={"tenant": "acme"}),
        error_details_pb2.RetryInfo(retry_delay=Duration(seconds=2, nanos=500_000_000)),
        error_details_pb2.Help(),
        error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(
                    field="sampling.top_p", description="must be > 0", reason="TOO_LOW"
                )
            ]
        ),
    )
    error = errors.from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", details)
    assert (error.reason, error.metadata, error.retry_after) == ("QUEUE_FULL", {"tenant": "acme"}, 2.5)
    assert error.violations == (errors.Violation("sampling.top_p", "must be > 0", "TOO_LOW"),)


@pytest.mark.parametrize(
    "details", [b"\xff\xff", google_status(error_details_pb2.ErrorInfo(reason="x"))[:-1] + b"\xff"]
)
def test_unreadable_details_leave_code_and_message(details: bytes) -> None:
    error = errors.from_status(grpc.StatusCode.NOT_FOUND, "gone", details)
    assert isinstance(error, lorafleet.AdapterNotFound)
    assert error.message == "gone"


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = {line.split()[1] for line in (errors.__doc__ or "").splitlines() if line[:1] in "├└" and line}
    real = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__
    }
    assert drawn == real - {"LoraFleetError", "LaunchError"}


def test_errors_travel_between_processes() -> None:
    """One that cannot be unpickled breaks the whole pool of its caller."""
    details = google_status(
        error_details_pb2.ErrorInfo(reason="QUEUE_FULL", metadata={"tenant": "acme"}),
        error_details_pb2.RetryInfo(retry_delay=Duration(seconds=2)),
        error_details_pb2.BadRequest(
            field_violations=[error_details_pb2.BadRequest.FieldViolation(field="f", description="d")]
        ),
    )
    error = errors.from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", details)
    arrived = pickle.loads(pickle.dumps(error))
    assert (type(arrived), str(arrived), vars(arrived)) == (type(error), str(error), vars(error))
