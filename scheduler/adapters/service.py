"""The Adapters service: operators' view of the store, as far as the caller sees it.

What a caller does not see is NOT_FOUND, whatever they may do. Reading the catalogue (Get, List, ListAliases)
needs no right, Push and Pull need "push", and the others "manage". upkeep.py has the calls about copies and
bytes.
"""

from collections.abc import AsyncIterator
from contextlib import ExitStack

from adapter_store import AdapterNotFound, DataLoss, Manifest, NameRecord, Summary
from lorafleet.v1 import adapters_pb2 as pb
from scheduler import audit
from scheduler.adapters.calls import Context, digest_ref, full_name
from scheduler.adapters.transfer import (
    Patience,
    disk_errors,
    not_looked_for,
    read_files,
    receive_files,
    receive_header,
    send_piece,
)
from scheduler.adapters.upkeep import Upkeep
from scheduler.adapters.wire import (
    add_details,
    alias_message,
    alias_ref,
    alias_targets,
    listing_names,
    push_target,
    summary_message,
    version_message,
)
from scheduler.admission.identity import PUSH
from scheduler.admission.lookup import parse_ref
from scheduler.errors import InvalidRequest
from scheduler.rpc_errors import translate_errors

DEFAULT_PAGE, MAX_PAGE = 100, 1000
MAX_PAGE_TOKEN_CHARS = 256
MAX_PAGE_BYTES = 8 * 1024 * 1024  # Versions of a deep model take tens of kilobytes each.


class AdaptersService(Upkeep):
    """Translates only."""

    @translate_errors
    async def Push(
        self, request_iterator: AsyncIterator[pb.PushRequest], context: Context
    ) -> pb.PushResponse:
        identity = audit.caller()
        patience = Patience(self._awake)
        header = await receive_header(request_iterator, patience)
        audit.asks_for(header.adapter)
        push = push_target(header, identity)
        with ExitStack() as held:
            held.enter_context(self._one_transfer(identity))
            with disk_errors():
                place = await self._transfer(self._spool.place, identity.tenant)
                held.callback(place.give_back)
                limit = self._limits.max_push_bytes
                await receive_files(request_iterator, place, limit, self._transfers, patience)
            push = push.with_warnings(not_looked_for(header, place.folder))
            pushed = await self._store_files(place, push, held.pop_all())
        dry_run = push.options.dry_run
        if not dry_run:
            audit.changed(context, "pushed", adapter=full_name(pushed.version), digest=pushed.version.digest)
        aliases = await self._run(self._store.aliases, push.tenant, push.name)
        response = pb.PushResponse(version=version_message(pushed.version, aliases), created=pushed.created)
        for alias in aliases:
            if alias.alias == push.options.alias and not dry_run:
                response.alias.CopyFrom(alias_message(alias))
        return response

    @translate_errors
    async def Pull(self, request: pb.PullRequest, context: Context) -> None:
        version = await self._find(request.adapter, context, "downloading an adapter", right=PUSH)
        identity, patience = audit.caller(), Patience(self._awake)
        with ExitStack() as held:
            held.enter_context(self._one_transfer(identity))
            with disk_errors():
                place = await self._transfer(self._spool.place, identity.tenant)
                held.callback(place.give_back)
                place.take(version.manifest.num_bytes)
                await self._transfer(self._store.export, digest_ref(version), place.folder)
                pieces = read_files(place.folder)
                while (piece := await self._transfer(next, pieces, None)) is not None:
                    await send_piece(context, piece, patience)

    @translate_errors
    async def Get(self, request: pb.GetAdapterRequest, context: Context) -> pb.GetAdapterResponse:
        version = await self._find(request.adapter, context)
        return pb.GetAdapterResponse(version=await self._message(version))

    @translate_errors
    async def List(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        identity = audit.caller()
        size = request.page_size or DEFAULT_PAGE
        if size > MAX_PAGE:
            raise InvalidRequest("page_size", f"{size} is more than {MAX_PAGE}")
        if len(request.page_token) > MAX_PAGE_TOKEN_CHARS:
            raise InvalidRequest("page_token", "is not from a response of this service")
        tenant, name = listing_names(request.tenant, request.name, identity)

        def page() -> pb.ListAdaptersResponse:
            seen, after = list[Summary](), request.page_token
            for prefix in identity.name_prefixes(tenant):  # Of others' names as few as may be are read.
                after = max(after, prefix)
                while len(seen) <= size and (
                    found := self._store.summaries(
                        tenant, name=name, after=after, limit=size + 1, deleted=request.deleted
                    )
                ):
                    seen += [each for each in found if identity.sees(each.tenant, each.name)]
                    after = found[-1].key
                    if not after.startswith(prefix):
                        break
            # A token names what the caller sees: what they do not see must not show in it.
            response = pb.ListAdaptersResponse(next_page_token=seen[size - 1].key if seen[size:] else "")
            del seen[size:]
            if request.summary:
                response.versions.extend(map(summary_message, seen))
                return response
            num_bytes, records = 0, {each.name: self._record(tenant, each.name) for each in seen}
            for last, each in zip(["", *(each.key for each in seen)], seen, strict=False):
                message = summary_message(each)
                manifest, entry = self._manifest(each.digest), records[each.name].versions.get(each.digest)
                if manifest is not None and entry is not None:
                    add_details(message, manifest, entry.push)
                num_bytes += message.ByteSize()
                if num_bytes > MAX_PAGE_BYTES and response.versions:
                    response.next_page_token = last
                    break
                response.versions.append(message)
            return response

        return await self._list(identity, page)

    @translate_errors
    async def Delete(self, request: pb.DeleteAdapterRequest, context: Context) -> pb.DeleteAdapterResponse:
        await self._find(request.adapter, context, "deleting an adapter")
        ref = parse_ref(request.adapter, audit.caller())
        version = await self._change(  # An alias may have moved since it was looked up.
            request.adapter,
            ref,
            lambda: self._store.withdraw(ref, force=request.force, end_requests=request.now),
        )
        audit.changed(context, "deleted", adapter=full_name(version), digest=version.digest)
        self._retirement.withdrawn(full_name(version), version.digest)
        return pb.DeleteAdapterResponse(digest=version.digest)

    @translate_errors
    async def SetAlias(self, request: pb.SetAliasRequest, context: Context) -> pb.SetAliasResponse:
        identity = audit.caller()
        audit.asks_for(request.adapter)
        ref, alias = alias_ref(request.adapter, identity)
        weights: dict[str, int] = {}
        for field, text, weight in alias_targets(request):
            target = f"{full_name(ref)}@{text}"
            version = await self._find(target, context, "moving an alias", field=field)
            weights[version.digest] = weights.get(version.digest, 0) + weight
        generation = request.expected_generation if request.HasField("expected_generation") else None
        moved = await self._change(
            request.adapter,
            ref,
            lambda: self._store.split_alias(
                ref.tenant, ref.name, alias, weights, expected_generation=generation
            ),
        )
        audit.changed(context, "alias set", adapter=f"{full_name(ref)}@{alias}", digest=" ".join(weights))
        return pb.SetAliasResponse(alias=alias_message(moved))

    @translate_errors
    async def DeleteAlias(self, request: pb.DeleteAliasRequest, context: Context) -> pb.DeleteAliasResponse:
        ref, alias = alias_ref(request.adapter, audit.caller())
        await self._find(request.adapter, context, "removing an alias")
        await self._change(
            request.adapter, ref, lambda: self._store.delete_alias(ref.tenant, ref.name, alias)
        )
        audit.changed(context, "alias removed", adapter=f"{full_name(ref)}@{alias}")
        return pb.DeleteAliasResponse()

    @translate_errors
    async def ListAliases(self, request: pb.ListAliasesRequest, context: Context) -> pb.ListAliasesResponse:
        identity = audit.caller()
        tenant, name = listing_names(request.tenant, request.name, identity)
        aliases = await self._list(identity, lambda: self._store.aliases(tenant, name))
        seen = [alias_message(alias) for alias in aliases if identity.sees(alias.tenant, alias.name)]
        return pb.ListAliasesResponse(aliases=seen)

    @translate_errors
    async def Protect(self, request: pb.ProtectRequest, context: Context) -> pb.ProtectResponse:
        return pb.ProtectResponse(version=await self._protect(request.adapter, context, protected=True))

    @translate_errors
    async def Unprotect(self, request: pb.UnprotectRequest, context: Context) -> pb.UnprotectResponse:
        return pb.UnprotectResponse(version=await self._protect(request.adapter, context, protected=False))

    async def _protect(self, text: str, context: Context, *, protected: bool) -> pb.AdapterVersion:
        version = await self._find(text, context, "protecting an adapter")
        ref = digest_ref(version)
        changed = await self._change(
            text,
            ref,
            lambda: self._store.set_protected(ref.tenant, ref.name, version.digest, protected),
        )
        audit.changed(
            context,
            "protected" if protected else "unprotected",
            adapter=full_name(version),
            digest=version.digest,
        )
        return await self._message(changed)

    def _manifest(self, digest: str) -> Manifest | None:
        """None when the version was removed while it was listed, or cannot be read."""
        try:
            return self._store.manifest(digest)
        except (AdapterNotFound, DataLoss):
            return None

    def _record(self, tenant: str, name: str) -> NameRecord:
        """Empty when it cannot be read."""
        try:
            return self._store.record(tenant, name)
        except DataLoss:
            return NameRecord()
