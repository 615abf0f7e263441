"""The calls as data: what to send, where to, and what to make of each message that comes back.

lorafleet/calls.py sends them: `unary`, `upload` (Push) and `stream` (generate, watch_fleet, pull).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from lorafleet import requests, results, wire
from lorafleet.v1 import adapters_pb2, fleet_pb2, inference_pb2

T = TypeVar("T")
_PAGE_SIZE = 1000


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """method: the full gRPC path. result: makes the value to return from the response message."""

    method: str
    request: Message
    response: type[Message]
    result: Callable[[Any], T]


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Part of a listing; next_token is empty after the last."""

    items: tuple[T, ...]
    next_token: str


def generate(request: inference_pb2.GenerateRequest) -> Operation[inference_pb2.GenerateChunk]:
    """A stream of chunks as they are; lorafleet/answer.py folds them."""
    return Operation(
        "/lorafleet.v1.Inference/GenerateStream", request, inference_pb2.GenerateChunk, lambda chunk: chunk
    )


def tokenize(
    prompt: str | Sequence[Mapping[str, str]], adapter: str | None
) -> Operation[results.Tokenization]:
    return Operation(
        "/lorafleet.v1.Inference/Tokenize",
        requests.tokenize_request(prompt, adapter),
        inference_pb2.TokenizeResponse,
        wire.tokenization,
    )


def list_models(page_token: str) -> Operation[Page[results.Models]]:
    """A page of one item: the base model with some of its adapters."""
    return Operation(
        "/lorafleet.v1.Inference/ListModels",
        inference_pb2.ListModelsRequest(page_size=_PAGE_SIZE, page_token=page_token),
        inference_pb2.ListModelsResponse,
        lambda response: Page((wire.models(response),), response.next_page_token),
    )


def join_models(pages: Sequence[results.Models]) -> results.Models:
    """pages: at least one."""
    return replace(pages[0], adapters=tuple(adapter for page in pages for adapter in page.adapters))


def watch_fleet() -> Operation[results.Fleet]:
    """A stream of snapshots."""
    return Operation(
        "/lorafleet.v1.Fleet/Watch", fleet_pb2.WatchFleetRequest(), fleet_pb2.FleetSnapshot, wire.fleet
    )


def push(
    name: str, alias: str, strict_base: bool, dry_run: bool, expected_generation: int | None
) -> Operation[results.PushResult]:
    """An upload whose first message carries `request`; lorafleet/transfer.py makes the messages."""
    header = adapters_pb2.PushHeader(
        adapter=name,
        alias=alias,
        strict_base=strict_base,
        dry_run=dry_run,
        expected_generation=expected_generation,
    )
    return Operation(
        "/lorafleet.v1.Adapters/Push",
        adapters_pb2.PushRequest(header=header),
        adapters_pb2.PushResponse,
        wire.push_result,
    )


def pull(ref: str) -> Operation[adapters_pb2.PullResponse]:
    """A stream of file pieces; lorafleet/transfer.py writes them."""
    return Operation(
        "/lorafleet.v1.Adapters/Pull",
        adapters_pb2.PullRequest(adapter=ref),
        adapters_pb2.PullResponse,
        lambda message: message,
    )


def get_adapter(ref: str) -> Operation[results.AdapterVersion]:
    return Operation(
        "/lorafleet.v1.Adapters/Get",
        adapters_pb2.GetAdapterRequest(adapter=ref),
        adapters_pb2.GetAdapterResponse,
        lambda response: wire.version(response.version),
    )


def list_adapters(name: str, tenant: str, page_token: str) -> Operation[Page[results.AdapterVersion]]:
    return Operation(
        "/lorafleet.v1.Adapters/List",
        adapters_pb2.ListAdaptersRequest(
            name=name, tenant=tenant, page_size=_PAGE_SIZE, page_token=page_token
        ),
        adapters_pb2.ListAdaptersResponse,
        lambda response: Page(tuple(map(wire.version, response.versions)), response.next_page_token),
    )


def delete_adapter(ref: str) -> Operation[str]:
    return Operation(
        "/lorafleet.v1.Adapters/Delete",
        adapters_pb2.DeleteAdapterRequest(adapter=ref),
        adapters_pb2.DeleteAdapterResponse,
        lambda response: str(response.digest),
    )


def set_alias(ref: str, target: str, expected_generation: int | None) -> Operation[results.AdapterAlias]:
    return Operation(
        "/lorafleet.v1.Adapters/SetAlias",
        adapters_pb2.SetAliasRequest(adapter=ref, target=target, expected_generation=expected_generation),
        adapters_pb2.SetAliasResponse,
        lambda response: wire.alias(response.alias),
    )


def delete_alias(ref: str) -> Operation[None]:
    return Operation(
        "/lorafleet.v1.Adapters/DeleteAlias",
        adapters_pb2.DeleteAliasRequest(adapter=ref),
        adapters_pb2.DeleteAliasResponse,
        lambda response: None,
    )


def list_aliases(name: str, tenant: str) -> Operation[tuple[results.AdapterAlias, ...]]:
    return Operation(
        "/lorafleet.v1.Adapters/ListAliases",
        adapters_pb2.ListAliasesRequest(name=name, tenant=tenant),
        adapters_pb2.ListAliasesResponse,
        lambda response: tuple(map(wire.alias, response.aliases)),
    )


def protect(ref: str) -> Operation[results.AdapterVersion]:
    return Operation(
        "/lorafleet.v1.Adapters/Protect",
        adapters_pb2.ProtectRequest(adapter=ref),
        adapters_pb2.ProtectResponse,
        lambda response: wire.version(response.version),
    )


def unprotect(ref: str) -> Operation[results.AdapterVersion]:
    return Operation(
        "/lorafleet.v1.Adapters/Unprotect",
        adapters_pb2.UnprotectRequest(adapter=ref),
        adapters_pb2.UnprotectResponse,
        lambda response: wire.version(response.version),
    )


def verify(ref: str) -> Operation[results.Verification]:
    return Operation(
        "/lorafleet.v1.Adapters/Verify",
        adapters_pb2.VerifyRequest(adapter=ref),
        adapters_pb2.VerifyResponse,
        wire.verification,
    )


def residency(ref: str) -> Operation[tuple[results.Residency, ...]]:
    return Operation(
        "/lorafleet.v1.Adapters/Residency",
        adapters_pb2.ResidencyRequest(adapter=ref),
        adapters_pb2.ResidencyResponse,
        lambda response: tuple(map(wire.residency, response.copies)),
    )
