"""How a failure is told to a scheduler: one table from exceptions to stable reasons and gRPC codes."""

import logging
import uuid
from dataclasses import dataclass

import grpc

import adapter_store.errors as store
import executor.lora.errors as lora
from executor.batch.sampling import SampleFailure
from executor.errors import AdapterLoadTimeout, ConstraintFailed, ExecutorError, InvalidDispatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a dispatch does not run, or not go on. `retryable`: it may go back to its place in the queue."""

    reason: str
    message: str
    retryable: bool
    code: grpc.StatusCode


class RejectedByRank(ExecutorError):
    """Another rank's failure, as it was told there."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.message)
        self.rejection = rejection


def no_seats(max_seats: int) -> Rejection:
    return Rejection("NO_SEATS", f"all {max_seats} seats are taken", True, grpc.StatusCode.RESOURCE_EXHAUSTED)


def draining() -> Rejection:
    return Rejection("DRAINING", "this executor is shutting down", True, grpc.StatusCode.UNAVAILABLE)


def no_token(failure: SampleFailure, guided: bool, model: str, dtype: str, digest: str) -> Rejection:
    """The rejection for want of a token: because of what guides the answer; of a request's own biases and
    penalties; or of what it asks for, an adapter (its digest) or else the model, whose numbers do not fit
    into the dtype that this executor computes in."""
    if failure is SampleFailure.NOTHING_LEFT and guided:
        told = "constraint, allowed_token_ids and bad_words leave nothing to draw"
        return rejection_of(ConstraintFailed(told))
    if failure is SampleFailure.NOTHING_LEFT:
        return Rejection("NOTHING_TO_DRAW", failure.value, False, grpc.StatusCode.INVALID_ARGUMENT)
    whose = f"with adapter {digest}" if digest else f"of base model {model}"
    remedy = "use executors with --dtype bfloat16" if dtype == "float16" else "its weights are too large"
    message = f"the logits {whose} are not finite in {dtype}: {remedy}"
    return Rejection("INVALID_LOGITS", message, False, grpc.StatusCode.FAILED_PRECONDITION)


def rejection_of(error: Exception) -> Rejection:
    """The rejection as another rank told it, or the first match of the table. Anything else is a bug: its
    text stays in the log, under the id told."""
    if isinstance(error, RejectedByRank):
        return error.rejection
    for kind, reason, retryable, code in _TABLE:
        if isinstance(error, kind):
            return Rejection(reason, str(error), retryable, code)
    return internal(error)


def internal(error: Exception) -> Rejection:
    error_id = uuid.uuid4().hex[:16]
    logger.error("internal error %s", error_id, exc_info=error)
    return Rejection("INTERNAL", f"internal error {error_id}", False, grpc.StatusCode.INTERNAL)


_TABLE: tuple[tuple[type[Exception], str, bool, grpc.StatusCode], ...] = (
    (InvalidDispatch, "INVALID_REQUEST", False, grpc.StatusCode.INVALID_ARGUMENT),
    (ConstraintFailed, "CONSTRAINT_FAILED", False, grpc.StatusCode.FAILED_PRECONDITION),
    (store.InvalidRef, "INVALID_REQUEST", False, grpc.StatusCode.INVALID_ARGUMENT),
    (AdapterLoadTimeout, "ADAPTER_LOAD_TIMEOUT", True, grpc.StatusCode.UNAVAILABLE),
    (store.AdapterNotFound, "ADAPTER_NOT_FOUND", False, grpc.StatusCode.NOT_FOUND),
    (store.DataLoss, "DATA_LOSS", False, grpc.StatusCode.DATA_LOSS),
    (store.StoreUnavailable, "STORE_UNAVAILABLE", True, grpc.StatusCode.UNAVAILABLE),
    (lora.LoRAError, "INCOMPATIBLE_ADAPTER", False, grpc.StatusCode.FAILED_PRECONDITION),
)
