"""The Adapters service over a real server, store and ingest process, with stand-ins for executors."""

import dataclasses
import hashlib
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from adapter_store import AdapterStore, ModelSpec, open_store
from lorafleet.doors import Door, Handlers, paths
from lorafleet.v1 import adapters_pb2 as pb
from lorafleet.v1 import adapters_pb2_grpc
from scheduler.adapters import retirement as retiring
from scheduler.adapters.calls import Backends, Limits, held_listings
from scheduler.adapters.ingest import Ingest
from scheduler.adapters.pinning import Copies
from scheduler.adapters.retirement import Retirement
from scheduler.adapters.service import AdaptersService
from scheduler.adapters.spool import Spool
from scheduler.admission import versions as resolving
from scheduler.admission.auth import Authenticator
from scheduler.admission.quarantine import Quarantine
from scheduler.admission.versions import Versions
from scheduler.audit import Audit, AuditInterceptor
from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.door import LIMITS, Doorkeeper
from scheduler.metrics import Metrics
from scheduler.text.chat import ChatTemplates
from scheduler.text.tokenizer import Tokenizer
from tests.support.adapters.peft import lora_pair, raw_adapter
from tests.support.services.fakes import FakeExecutor
from tests.support.services.scheduling import dispatcher_of, executors, ready

MAX_PUSH_BYTES = 256 * 1024
LOOK_S = (
    0.05  # Services look at the store, and at what was withdrawn, so often: four times as often as real ones.
)
LONGER_THAN_A_DRAIN_S = 10 * LOOK_S  # That waits for nobody, and takes three looks.
TOKENS = """
[[tokens]]
sha256 = "{acme}"
tenant = "acme"
rights = ["infer", "push", "manage", "operate"]
adapters = ["acme/*", "shared/*"]
[[tokens]]
sha256 = "{reader}"
tenant = "acme"
rights = ["infer"]
[[tokens]]
sha256 = "{guest}"
tenant = "acme"
rights = ["infer"]
adapters = ["acme/open-*"]
[[tokens]]
sha256 = "{rival}"
tenant = "rival"
rights = ["infer", "push", "manage", "operate"]
[[tokens]]
sha256 = "{curator}"
tenant = "curator"
rights = ["manage"]
adapters = ["*/*"]
[[tokens]]
sha256 = "{root}"
tenant = "root"
rights = ["infer", "push", "manage", "operate"]
adapters = ["*/*"]
"""


@dataclasses.dataclass
class Running:
    stub: Any
    spool: Path  # the service's own folder there
    folders: Path
    store: AdapterStore
    url: str  # of the store
    store_folder: Path
    versions: Versions
    dispatcher: Dispatcher
    executors: list[FakeExecutor]
    registry: CollectorRegistry
    port: int

    def content(self, seed: int, **files: str) -> dict[str, bytes]:
        """The files of a small adapter."""
        folder = self.folders / str(seed)
        tensors = lora_pair("model.layers.0.self_attn.q_proj", 64, 64, seed=seed)
        raw_adapter(folder, tensors, target_modules=["q_proj"])
        content = {file.name: file.read_bytes() for file in folder.iterdir()}
        return content | {f"{name}.jinja": text.encode() for name, text in files.items()}


@asynccontextmanager
async def running_service(
    root: Path, spec: ModelSpec, tokenizer: Tokenizer, *, store_url: str = "", delete_grace_s: float = 0.0
) -> AsyncIterator[Running]:
    """Two executors behind a dispatcher."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retiring, "TICK_S", LOOK_S)
        patch.setattr(resolving, "POLL_S", LOOK_S)
        async with _started(root, spec, tokenizer, store_url, delete_grace_s) as running:
            yield running


@asynccontextmanager
async def _started(
    root: Path, spec: ModelSpec, tokenizer: Tokenizer, store_url: str, delete_grace_s: float
) -> AsyncIterator[Running]:
    tokens, spool, registry = root / "tokens.toml", root / "spool", CollectorRegistry()
    spool.mkdir()
    names = ("acme", "reader", "guest", "rival", "curator", "root")
    tokens.write_text(TOKENS.format(**{name: hashlib.sha256(name.encode()).hexdigest() for name in names}))
    url = store_url or str(root / "store")
    store, metrics = open_store(url), Metrics(registry)
    with ThreadPoolExecutor(4) as pool:
        templates = ChatTemplates(None, tokenizer.special_tokens, pool)
        ingest = Ingest(url, templates)
        async with executors(2) as fakes:
            for fake in fakes:
                fake.pages = True
            versions = Versions(store, count=metrics.resolved)
            quarantine = Quarantine(store, versions, pool, metrics.data_loss)
            addresses = [fake.address for fake in fakes]
            dispatcher = dispatcher_of(addresses, tokenizer, data_loss=quarantine.suspect)
            retirement = Retirement(store, versions, dispatcher, pool, time.monotonic)
            backends = Backends(
                store,
                spec,
                ingest,
                versions,
                Copies(dispatcher.fleet),
                retirement,
                pool,
                quarantine,
                Spool(spool, 2 * MAX_PUSH_BYTES, lambda tenant: MAX_PUSH_BYTES),
                held_listings(lambda tenant: 1),
            )
            limits = Limits(MAX_PUSH_BYTES, 2, lambda tenant: 1, delete_grace_s)
            server = paths.make_server(
                [("grpc.max_receive_message_length", 16 * 1024 * 1024)],
                # Each look at this clock begins a new window: no test's lines are left out for another's.
                [AuditInterceptor(Audit((), metrics.refused, itertools.count().__next__))],
            )
            doorkeeper = Doorkeeper(Authenticator(tokens), metrics.refused_at_door)
            handlers = Handlers(server, Door(doorkeeper, LIMITS))
            adapters_pb2_grpc.add_AdaptersServicer_to_server(AdaptersService(backends, limits), handlers)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            await retirement.start()
            for part in (versions, dispatcher):
                part.start()
            await ready(dispatcher, 2)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = adapters_pb2_grpc.AdaptersStub(channel)
                folders = root / "folders"
                yield Running(
                    stub,
                    backends.spool.folder,
                    folders,
                    store,
                    url,
                    root / "store",
                    versions,
                    dispatcher,
                    fakes,
                    registry,
                    port,
                )
            versions.stop()
            await dispatcher.stop()
            await retirement.stop()
            await server.stop(None)
            await templates.close()
            backends.spool.close()
    ingest.close()


def as_(who: str) -> dict[str, Any]:
    return {"metadata": [("authorization", f"Bearer {who}")]}


def parts(
    adapter: str, files: dict[str, bytes], piece: int = 1000, **header: Any
) -> Iterator[pb.PushRequest]:
    yield pb.PushRequest(header=pb.PushHeader(adapter=adapter, **header))
    for name, data in files.items():
        for start in range(0, max(len(data), 1), piece):
            yield pb.PushRequest(chunk=pb.FileChunk(name=name, data=data[start : start + piece]))


async def push(
    service: Running, adapter: str, files: dict[str, bytes], who: str = "acme", **header: Any
) -> pb.PushResponse:
    return await service.stub.Push(parts(adapter, files, **header), **as_(who))


async def pushed(service: Running, name: str, seed: int, who: str = "acme") -> str:
    return str((await push(service, name, service.content(seed), who=who)).version.digest)


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def read_all(stream: Any) -> list[Any]:
    return [message async for message in stream]
