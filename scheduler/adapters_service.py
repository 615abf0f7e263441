"""The Adapters service: operators' view of the store, as far as the caller sees it.

What a caller does not see is NOT_FOUND, whatever they may do. Reading the catalogue (Get, List, ListAliases)
needs no right; everything else needs "admin".
"""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TypeAlias, TypeVar

import grpc

import adapter_store
from adapter_store import AdapterStore, Alias, ModelSpec, Ref, Version
from lorafleet.v1 import adapters_pb2 as pb
from lorafleet.v1 import adapters_pb2_grpc
from scheduler.adapters_wire import alias_message, alias_ref, listing_names, push_target, version_message
from scheduler.auth import ADMIN, Authenticator, Identity
from scheduler.errors import AdapterNotFound, InvalidRequest, QueueFull, Unsupported
from scheduler.ingest import Ingest
from scheduler.lookup import find_version, parse_ref, require
from scheduler.status import translate_errors
from scheduler.transfer import read_files, receive_files, receive_header, send_piece

MAX_PUSH_BYTES = 8 * 1024**3
MAX_HEAVY_CALLS = 4
DEFAULT_PAGE, MAX_PAGE = 100, 1000
MAX_PAGE_TOKEN_CHARS = 256
MAX_PAGE_BYTES = 8 * 1024 * 1024  # Versions of a deep model take tens of kilobytes each.

T = TypeVar("T")
Context: TypeAlias = grpc.aio.ServicerContext


class AdaptersService(adapters_pb2_grpc.AdaptersServicer):
    """Translates only. The store is called in `pool`, whose size bounds how many calls it sees at once; a
    cancelled call leaves its thread to finish. Uploads and downloads pass through folders in `spool`.

    Push, Pull and Verify take long: only `max_heavy_calls` run at once, and more are refused, so that threads
    are left for everybody else.
    """

    def __init__(
        self,
        store: AdapterStore,
        spec: ModelSpec,
        authenticator: Authenticator,
        ingest: Ingest,
        residency: Callable[[], Sequence[pb.AdapterResidency]],
        drop: Callable[[str], None],
        pool: Executor,
        *,
        spool: Path | None = None,
        max_push_bytes: int = MAX_PUSH_BYTES,
        max_heavy_calls: int = MAX_HEAVY_CALLS,
    ) -> None:
        self._store = store
        self._spec = spec
        self._authenticator = authenticator
        self._ingest = ingest
        self._residency = residency
        self._drop = drop
        self._pool = pool
        self._spool = spool
        self._max_push_bytes = max_push_bytes
        self._heavy = asyncio.Semaphore(max_heavy_calls)

    @translate_errors
    async def Push(
        self, request_iterator: AsyncIterator[pb.PushRequest], context: Context
    ) -> pb.PushResponse:
        identity = self._identify(context)
        push = push_target(await receive_header(request_iterator), identity)
        self._refuse_if_busy()
        async with self._heavy:
            folder = await self._run(self._make_folder)
            try:
                await receive_files(request_iterator, folder, self._max_push_bytes, self._pool)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            pushed = await self._ingest.put(folder, push, self._spec)
        aliases = await self._run(self._store.aliases, push.tenant, push.name)
        response = pb.PushResponse(version=version_message(pushed.version, aliases), created=pushed.created)
        for alias in aliases:
            if alias.alias == push.alias and not push.dry_run:
                response.alias.CopyFrom(alias_message(alias))
        return response

    @translate_errors
    async def Pull(self, request: pb.PullRequest, context: Context) -> None:
        version = await self._find(request.adapter, context, "downloading an adapter")
        self._refuse_if_busy()
        async with self._heavy:
            folder = await self._run(self._make_folder)
            try:
                await self._run(self._store.export, _digest_ref(version), folder)
                pieces = read_files(folder)
                while (piece := await self._run(next, pieces, None)) is not None:
                    await send_piece(context, piece)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    @translate_errors
    async def Get(self, request: pb.GetAdapterRequest, context: Context) -> pb.GetAdapterResponse:
        version = await self._find(request.adapter, context)
        return pb.GetAdapterResponse(version=await self._message(version))

    @translate_errors
    async def List(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        identity = self._identify(context)
        size = request.page_size or DEFAULT_PAGE
        if size > MAX_PAGE:
            raise InvalidRequest("page_size", f"{size} is more than {MAX_PAGE}")
        if len(request.page_token) > MAX_PAGE_TOKEN_CHARS:
            raise InvalidRequest("page_token", "is not from a response of this service")
        tenant, name = listing_names(request.tenant, request.name, identity)

        def page() -> tuple[list[Version], list[Alias]]:
            versions = self._store.list(tenant, name=name, after=request.page_token, limit=size + 1)
            return versions, self._store.aliases(tenant, name)

        versions, aliases = await self._run(page)
        response = pb.ListAdaptersResponse()
        num_bytes = 0
        for index, version in enumerate(versions):
            if index == size or num_bytes > MAX_PAGE_BYTES:
                last = versions[index - 1]
                response.next_page_token = f"{last.name}@{last.digest}"
                break
            if identity.sees(version.tenant, version.name):
                message = version_message(version, aliases)
                num_bytes += message.ByteSize()
                response.versions.append(message)
        return response

    @translate_errors
    async def Delete(self, request: pb.DeleteAdapterRequest, context: Context) -> pb.DeleteAdapterResponse:
        version = await self._find(request.adapter, context, "deleting an adapter")
        ref = parse_ref(request.adapter, self._identify(context))
        await self._change(request.adapter, lambda: self._store.delete(ref))
        self._drop(version.digest)  # Another name may have the same content: then it is loaded again.
        return pb.DeleteAdapterResponse(digest=version.digest)

    @translate_errors
    async def SetAlias(self, request: pb.SetAliasRequest, context: Context) -> pb.SetAliasResponse:
        identity = self._identify(context)
        ref, alias = alias_ref(request.adapter, identity)
        target = f"{ref.tenant}/{ref.name}@{request.target}"
        version = await self._find(target, context, "moving an alias", field="target")
        generation = request.expected_generation if request.HasField("expected_generation") else None
        moved = await self._change(
            target,
            lambda: self._store.set_alias(
                ref.tenant, ref.name, alias, version.digest, expected_generation=generation
            ),
        )
        return pb.SetAliasResponse(alias=alias_message(moved))

    @translate_errors
    async def DeleteAlias(self, request: pb.DeleteAliasRequest, context: Context) -> pb.DeleteAliasResponse:
        ref, alias = alias_ref(request.adapter, self._identify(context))
        await self._find(request.adapter, context, "removing an alias")
        await self._change(request.adapter, lambda: self._store.delete_alias(ref.tenant, ref.name, alias))
        return pb.DeleteAliasResponse()

    @translate_errors
    async def ListAliases(self, request: pb.ListAliasesRequest, context: Context) -> pb.ListAliasesResponse:
        identity = self._identify(context)
        aliases = await self._run(self._store.aliases, *listing_names(request.tenant, request.name, identity))
        seen = [alias_message(alias) for alias in aliases if identity.sees(alias.tenant, alias.name)]
        return pb.ListAliasesResponse(aliases=seen)

    @translate_errors
    async def Protect(self, request: pb.ProtectRequest, context: Context) -> pb.ProtectResponse:
        return pb.ProtectResponse(version=await self._protect(request.adapter, context, protected=True))

    @translate_errors
    async def Unprotect(self, request: pb.UnprotectRequest, context: Context) -> pb.UnprotectResponse:
        return pb.UnprotectResponse(version=await self._protect(request.adapter, context, protected=False))

    @translate_errors
    async def Verify(self, request: pb.VerifyRequest, context: Context) -> pb.VerifyResponse:
        identity = self._identify(context)
        if request.adapter:
            versions = [await self._find(request.adapter, context, "verifying an adapter")]
        else:
            require(identity, ADMIN, "verifying adapters")
            versions = await self._run(self._own_versions, identity)
        response = pb.VerifyResponse()
        self._refuse_if_busy()
        async with self._heavy:
            for version in versions:
                try:
                    await self._run(self._store.verify, _digest_ref(version))
                except adapter_store.DataLoss as error:
                    response.damaged[version.digest] = str(error)
                response.verified += 1
        return response

    @translate_errors
    async def Residency(self, request: pb.ResidencyRequest, context: Context) -> pb.ResidencyResponse:
        """Without an adapter: the copies of the caller's own tenant's versions."""
        identity = self._identify(context)
        if request.adapter:
            versions = [await self._find(request.adapter, context, "looking at executors")]
        else:
            require(identity, ADMIN, "looking at executors")
            versions = await self._run(self._own_versions, identity)
        digests = {version.digest for version in versions}
        copies = [copy for copy in self._residency() if copy.digest in digests]
        copies.sort(key=lambda copy: (copy.executor, copy.digest))
        return pb.ResidencyResponse(copies=copies)

    @translate_errors
    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        raise Unsupported("this server does not pin adapters yet")

    @translate_errors
    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:
        raise Unsupported("this server does not pin adapters yet")

    @translate_errors
    async def Drain(self, request: pb.DrainAdapterRequest, context: Context) -> pb.DrainAdapterResponse:
        raise Unsupported("this server does not drain adapters yet")

    @translate_errors
    async def Collect(self, request: pb.CollectRequest, context: Context) -> pb.CollectResponse:
        raise Unsupported("this server does not collect what is unused yet")

    def _identify(self, context: Context) -> Identity:
        return self._authenticator.identify(context.invocation_metadata())

    async def _find(
        self, text: str, context: Context, change: str | None = None, *, field: str = "adapter"
    ) -> Version:
        """The version, if the caller sees it; `change` says what they need the admin right for."""
        identity = self._identify(context)
        ref = parse_ref(text, identity, field)
        version = await self._run(find_version, self._store, ref, identity, text)
        if change is not None:
            require(identity, ADMIN, change)
        return version

    async def _change(self, text: str, change: Callable[[], T]) -> T:
        """What another call removed in between is not found, with the caller's own words."""
        try:
            return await self._run(change)
        except adapter_store.AdapterNotFound:
            raise AdapterNotFound(text) from None

    async def _protect(self, text: str, context: Context, *, protected: bool) -> pb.AdapterVersion:
        version = await self._find(text, context, "protecting an adapter")
        names = (version.tenant, version.name, version.digest)
        changed = await self._change(text, lambda: self._store.set_protected(*names, protected))
        return await self._message(changed)

    async def _message(self, version: Version) -> pb.AdapterVersion:
        return version_message(version, await self._run(self._store.aliases, version.tenant, version.name))

    async def _run(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)

    def _refuse_if_busy(self) -> None:
        if self._heavy.locked():
            raise QueueFull("too many adapters are being pushed, pulled or verified now", retry_after_s=5.0)

    def _make_folder(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="lorafleet-", dir=self._spool))

    def _own_versions(self, identity: Identity) -> list[Version]:
        versions: list[Version] = []
        after = ""
        while page := self._store.list(identity.tenant, after=after, limit=MAX_PAGE):
            versions += [version for version in page if identity.sees(version.tenant, version.name)]
            after = f"{page[-1].name}@{page[-1].digest}"
        return versions


def _digest_ref(version: Version) -> Ref:
    return Ref(version.tenant, version.name, digest=version.digest)
