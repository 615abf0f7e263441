"""What a failed call tells, with all of its google.rpc details."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from lorafleet.doors.options import more_connections
from lorafleet.v1 import adapters_pb2, adapters_pb2_grpc, fleet_pb2_grpc, inference_pb2_grpc

LIMITS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    *more_connections(32),
]


@dataclass(frozen=True)
class Failure:
    code: str
    message: str
    reason: str
    domain: str
    metadata: Mapping[str, str]
    fields: tuple[str, ...]  # of BadRequest
    retry_s: float | None


@dataclass(frozen=True)
class Stubs:
    inference: Any
    adapters: Any
    fleet: Any


@contextmanager
def raw_stubs(address: str) -> Iterator[Stubs]:
    """The generated stubs, for messages that our client would not send."""
    with grpc.insecure_channel(address, options=LIMITS) as channel:
        yield Stubs(
            inference_pb2_grpc.InferenceStub(channel),
            adapters_pb2_grpc.AdaptersStub(channel),
            fleet_pb2_grpc.FleetStub(channel),
        )


def bearer(token: str | None) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")] if token else []


def failure(call: Callable[..., Any], message: Any, token: str | None = None, **options: Any) -> Failure:
    """Calls as `token`, reads streams to their end, and expects that to fail."""
    with pytest.raises(grpc.RpcError) as caught:
        result = call(message, metadata=bearer(token), **options)
        if hasattr(result, "__next__"):
            list(result)
    return failure_of(caught.value)


def failure_of(error: Any) -> Failure:
    info, fields, retry_s = error_details_pb2.ErrorInfo(), (), None
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad):
            fields = tuple(violation.field for violation in bad.field_violations)
        elif detail.Unpack(retry):
            retry_s = retry.retry_delay.ToNanoseconds() / 1e9
        else:
            assert detail.Unpack(info), detail.type_url
    return Failure(
        error.code().name, error.details(), info.reason, info.domain, dict(info.metadata), fields, retry_s
    )


def push_parts(adapter: str, files: Mapping[str, bytes], **header: Any) -> Iterator[Any]:
    """The messages of a push, each file in one piece of at most 1 MiB after the other."""
    yield adapters_pb2.PushRequest(header=adapters_pb2.PushHeader(adapter=adapter, **header))
    for name, data in files.items():
        for start in range(0, len(data) or 1, 1 << 20):
            yield piece(name, data[start : start + (1 << 20)])


def piece(name: str, data: bytes = b"x") -> Any:
    return adapters_pb2.PushRequest(chunk=adapters_pb2.FileChunk(name=name, data=data))
