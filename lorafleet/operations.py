"""The calls as data: what to send, where to, and what to make of each message that comes back.

lorafleet/adapter_operations.py has those of the Adapters service.
lorafleet/calls.py sends them: `unary`, `upload` (Push) and `stream` (generate, watch_fleet, pull).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from lorafleet import requests, results, wire
from lorafleet.errors import ACCEPTED, ANSWER_ID, REQUEST_ID
from lorafleet.v1 import fleet_pb2, inference_pb2

T = TypeVar("T")
PAGE_SIZE = 1000


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """method: service and method of the wire. result: makes the value to return from the response message.
    metadata: what the call tells beside who calls."""

    method: str
    request: Message
    result: Callable[[Any], T]
    metadata: tuple[tuple[str, str], ...] = ()

    @property
    def path(self) -> str:
        return f"/lorafleet.v1.{self.method}"

    @property
    def response(self) -> type[Message]:
        """What the wire says that the method answers with."""
        service, method = self.method.split("/")
        described: Any = self.request.DESCRIPTOR.file.services_by_name[service].methods_by_name[method]
        return GetMessageClass(described.output_type)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Part of a listing; next_token is empty after the last."""

    items: tuple[T, ...]
    next_token: str


def generate(
    request: inference_pb2.GenerateRequest, *, again: bool = False, answer_id: str = ""
) -> Operation[inference_pb2.GenerateChunk]:
    """A stream of chunks as they are; lorafleet/answer.py folds them. again: a server had accepted it, and
    had named its answer answer_id, if it names any."""
    metadata: tuple[tuple[str, str], ...] = ()
    if (request_id := request.request_id) and request_id.isascii() and request_id.isprintable():
        metadata += ((REQUEST_ID, request_id),)
    if again:
        metadata += (ACCEPTED,)
    if again and answer_id:
        metadata += ((ANSWER_ID, answer_id),)
    return Operation("Inference/GenerateStream", request, lambda chunk: chunk, metadata=metadata)


def tokenize(
    prompt: str | Sequence[Mapping[str, str]], adapter: str | None
) -> Operation[results.Tokenization]:
    return Operation("Inference/Tokenize", requests.tokenize_request(prompt, adapter), wire.tokenization)


def list_models(page_token: str) -> Operation[Page[results.Models]]:
    """A page of one item: the base model with some of its adapters."""
    return Operation(
        "Inference/ListModels",
        inference_pb2.ListModelsRequest(page_size=PAGE_SIZE, page_token=page_token),
        lambda response: Page((wire.models(response),), response.next_page_token),
    )


def join_models(pages: Sequence[results.Models]) -> results.Models:
    """pages: at least one."""
    return replace(pages[0], adapters=tuple(adapter for page in pages for adapter in page.adapters))


def watch_fleet(interval: float = 1.0) -> Operation[results.Fleet]:
    """A stream of snapshots, at least `interval` seconds apart."""
    request = fleet_pb2.WatchFleetRequest(interval_ms=max(1, round(interval * 1000)))
    return Operation("Fleet/Watch", request, wire.fleet)


def cordon(address: str, cordoned: bool) -> Operation[results.Executor]:
    return Operation(
        "Fleet/Cordon",
        fleet_pb2.CordonRequest(address=address, cordoned=cordoned),
        lambda response: wire.executor(response.executor),
    )


def drain(address: str) -> Operation[results.Executor]:
    return Operation(
        "Fleet/Drain",
        fleet_pb2.DrainExecutorRequest(address=address),
        lambda response: wire.executor(response.executor),
    )
