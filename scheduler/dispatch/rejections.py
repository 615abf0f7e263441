"""What executors answer in place of tokens, and what it says of the attempt."""

import grpc

from lorafleet.v1 import executor_pb2
from scheduler.dispatch.live_request import LiveRequest
from scheduler.errors import ExecutorFailed, SchedulerError, from_exception

# Rejections that only say "not now": they are no failure of the attempt.
BUSY_REASONS = frozenset({"NO_SEATS", "DRAINING"})
EXECUTOR_LOST = "EXECUTOR_LOST"
STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
# Final, but of one executor: another may have another form, dtype or cache, or another store by mistake.
LOCAL_REASONS = frozenset({"ADAPTER_NOT_FOUND", "DATA_LOSS", "INCOMPATIBLE_ADAPTER", "INVALID_LOGITS"})
_CODES = {code.value[0]: code for code in grpc.StatusCode if code is not grpc.StatusCode.OK}


def error_of(live: LiveRequest, name: str, rejected: executor_pb2.Rejected) -> SchedulerError:
    """What the client of a request is told; an internal error for a status that gRPC does not have."""
    code = _CODES.get(rejected.code)
    if code is None:
        said = f"{rejected.reason}: {rejected.message}"
        return from_exception(ValueError(f"executor {name} says status {rejected.code}, {said}"))
    adapter, digest = live.admitted.adapter, live.admitted.digest
    about = {"adapter": adapter, "digest": digest} if adapter else {}
    return ExecutorFailed(code, rejected.reason, rejected.message, about)
