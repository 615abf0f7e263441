"""A real Adapters and ListModels servicer over dictionaries, for what users type. Pages hold one item."""

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from lorafleet.v1 import adapters_pb2, adapters_pb2_grpc, inference_pb2
from tests.support.services.scripted_server import ScriptedInference


class MemoryAdapters(adapters_pb2_grpc.AdaptersServicer):
    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.versions: dict[str, adapters_pb2.AdapterVersion] = {}
        self.aliases: dict[str, adapters_pb2.AdapterAlias] = {}
        self.damaged: dict[str, str] = {}

    async def Push(self, messages: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
        files: dict[str, bytes] = {}
        async for message in messages:
            if message.HasField("header"):
                header = message.header
            else:
                files[message.chunk.name] = files.get(message.chunk.name, b"") + message.chunk.data
        content = b"".join(name.encode() + data for name, data in sorted(files.items()))
        digest = "sha256:" + hashlib.sha256(content).hexdigest()
        tenant, _, name = header.adapter.rpartition("/")
        tenant = tenant or "default"
        version = adapters_pb2.AdapterVersion(
            tenant=tenant, name=name, digest=digest, num_bytes=len(content), max_rank=4, warnings=["odd base"]
        )
        version.modules.add(name="layers.0.q_proj", rank=4, scale=2.0)
        created = digest not in self.versions
        if header.dry_run:
            return adapters_pb2.PushResponse(version=version, created=created)
        self.versions[digest], self.files[digest] = version, files
        alias = self._move(f"{tenant}/{name}@{header.alias}", digest) if header.alias else None
        return adapters_pb2.PushResponse(version=version, created=created, alias=alias)

    async def Pull(
        self, request: Any, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[adapters_pb2.PullResponse]:
        files = self.files[(await self._find(request.adapter, context)).digest]
        total = sum(map(len, files.values()))
        for name, data in files.items():
            for start in range(0, len(data), 3):
                piece = adapters_pb2.FileChunk(name=name, data=data[start : start + 3])
                yield adapters_pb2.PullResponse(chunk=piece, total_bytes=total)

    async def Get(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return adapters_pb2.GetAdapterResponse(version=await self._find(request.adapter, context))

    async def List(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        found = sorted(
            (v for v in self.versions.values() if request.name in ("", v.name)), key=lambda v: v.digest
        )
        index = int(request.page_token or 0)
        more = str(index + 1) if index + 1 < len(found) else ""
        return adapters_pb2.ListAdaptersResponse(versions=found[index : index + 1], next_page_token=more)

    async def Delete(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        version = await self._find(request.adapter, context)
        del self.versions[version.digest]
        return adapters_pb2.DeleteAdapterResponse(digest=version.digest)

    async def SetAlias(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        if request.HasField("expected_generation"):
            await context.abort(grpc.StatusCode.ABORTED, "the alias has moved")
        return adapters_pb2.SetAliasResponse(alias=self._move(request.adapter, request.target))

    async def DeleteAlias(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        del self.aliases[request.adapter]
        return adapters_pb2.DeleteAliasResponse()

    async def ListAliases(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return adapters_pb2.ListAliasesResponse(aliases=self.aliases.values())

    async def Verify(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return adapters_pb2.VerifyResponse(verified=len(self.versions), damaged=self.damaged)

    def _move(self, ref: str, digest: str) -> adapters_pb2.AdapterAlias:
        tenant, _, rest = ref.partition("/")
        name, _, alias = rest.partition("@")
        generation = self.aliases[ref].generation + 1 if ref in self.aliases else 1
        self.aliases[ref] = adapters_pb2.AdapterAlias(
            tenant=tenant, name=name, alias=alias, digest=digest, generation=generation
        )
        return self.aliases[ref]

    async def _find(self, ref: str, context: grpc.aio.ServicerContext) -> adapters_pb2.AdapterVersion:
        for version in self.versions.values():
            if ref in (f"{version.tenant}/{version.name}", version.name):
                return version
        return await context.abort(grpc.StatusCode.NOT_FOUND, f"no adapter {ref}")


class ListingInference(ScriptedInference):
    async def ListModels(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Two pages of one adapter."""
        first = not request.page_token
        model = inference_pb2.Model(
            adapter="acme/a@x" if first else "acme/b@y", digest="sha256:1", max_rank=8
        )
        return inference_pb2.ListModelsResponse(
            base_model="tiny", max_model_len=64, models=[model], next_page_token="2" if first else ""
        )
