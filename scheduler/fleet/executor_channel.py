"""Channels to executors: in clear, or with the TLS files as they are when a channel is opened."""

import asyncio

import grpc

from lorafleet.tls.credentials import channel_credentials_of
from lorafleet.tls.files import WatchedFiles
from lorafleet.tls.trouble import Settings, describe, find_trouble, may_be_trouble
from scheduler.fleet.endpoint import Endpoint
from scheduler.grpc_options import EXECUTOR_OPTIONS

_FLAGS = Settings(
    use="--executor-ca-file",
    ca="--executor-ca-file",
    cert="--executor-cert-file and --executor-key-file",
    off="leave --executor-ca-file out",
)


def open_channel(endpoint: Endpoint, files: WatchedFiles | None) -> grpc.aio.Channel:
    """In clear without files, and never when there are some."""
    if files is None:
        return grpc.aio.insecure_channel(endpoint.address, options=EXECUTOR_OPTIONS)
    options = [*EXECUTOR_OPTIONS]
    if endpoint.tls_name:
        options.append(("grpc.ssl_target_name_override", endpoint.tls_name))
    return grpc.aio.secure_channel(endpoint.address, channel_credentials_of(files.pem), options=options)


async def explained(details: str, files: WatchedFiles | None) -> str:
    """What gRPC told of a failed call, after what is wrong with TLS when that is why."""
    if not may_be_trouble(details):
        return details
    trouble = await asyncio.to_thread(find_trouble, details, files.tls if files else None)
    return f"{describe(trouble, _FLAGS)} ({details})" if trouble else details
