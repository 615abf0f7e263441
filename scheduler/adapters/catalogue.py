"""The Adapters service's calls about names: versions, aliases, and what may not be deleted."""

from lorafleet.v1 import adapters_pb2 as pb
from scheduler import audit
from scheduler.adapters.calls import Backends, Calls, Context, digest_ref, full_name
from scheduler.adapters.listing import Listing
from scheduler.adapters.wire import alias_message, alias_ref, alias_targets, listing_names, summary_message
from scheduler.admission.lookup import parse_ref
from scheduler.errors import InvalidRequest
from scheduler.rpc_errors import translate_errors

DEFAULT_PAGE, MAX_PAGE = 100, 1000
MAX_PAGE_TOKEN_CHARS = 256


class Catalogue:
    def __init__(self, calls: Calls, backends: Backends) -> None:
        self._calls, self._backends, self._store = calls, backends, backends.store

    @translate_errors
    async def Get(self, request: pb.GetAdapterRequest, context: Context) -> pb.GetAdapterResponse:
        version = await self._calls.find(request.adapter, context)
        return pb.GetAdapterResponse(version=await self._calls.message(version))

    @translate_errors
    async def List(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        identity = audit.caller()
        size = request.page_size or DEFAULT_PAGE
        if size > MAX_PAGE:
            raise InvalidRequest("page_size", f"{size} is more than {MAX_PAGE}")
        if len(request.page_token) > MAX_PAGE_TOKEN_CHARS:
            raise InvalidRequest("page_token", "is not from a response of this service")
        tenant, name = listing_names(request.tenant, request.name, identity)
        listing = Listing(self._store, identity, tenant, name, request.deleted)

        def page() -> pb.ListAdaptersResponse:
            seen, token = listing.page(request.page_token, size)
            if request.summary:
                return pb.ListAdaptersResponse(versions=map(summary_message, seen), next_page_token=token)
            versions, last = listing.with_details(seen)
            return pb.ListAdaptersResponse(versions=versions, next_page_token=token if last is None else last)

        return await self._calls.list_all(identity, page)

    @translate_errors
    async def Delete(self, request: pb.DeleteAdapterRequest, context: Context) -> pb.DeleteAdapterResponse:
        await self._calls.find(request.adapter, context, "deleting an adapter")
        ref = parse_ref(request.adapter, audit.caller())
        version = await self._calls.change(  # An alias may have moved since it was looked up.
            request.adapter,
            ref,
            lambda: self._store.withdraw(ref, force=request.force, end_requests=request.now),
        )
        audit.changed(context, "deleted", adapter=full_name(version), digest=version.digest)
        self._backends.retirement.withdrawn(full_name(version), version.digest)
        return pb.DeleteAdapterResponse(digest=version.digest)

    @translate_errors
    async def SetAlias(self, request: pb.SetAliasRequest, context: Context) -> pb.SetAliasResponse:
        identity = audit.caller()
        audit.asks_for(request.adapter)
        ref, alias = alias_ref(request.adapter, identity)
        weights: dict[str, int] = {}
        for field, text, weight in alias_targets(request):
            target = f"{full_name(ref)}@{text}"
            version = await self._calls.find(target, context, "moving an alias", field=field)
            weights[version.digest] = weights.get(version.digest, 0) + weight
        generation = request.expected_generation if request.HasField("expected_generation") else None
        moved = await self._calls.change(
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
        await self._calls.find(request.adapter, context, "removing an alias")
        await self._calls.change(
            request.adapter, ref, lambda: self._store.delete_alias(ref.tenant, ref.name, alias)
        )
        audit.changed(context, "alias removed", adapter=f"{full_name(ref)}@{alias}")
        return pb.DeleteAliasResponse()

    @translate_errors
    async def ListAliases(self, request: pb.ListAliasesRequest, context: Context) -> pb.ListAliasesResponse:
        identity = audit.caller()
        tenant, name = listing_names(request.tenant, request.name, identity)
        aliases = await self._calls.list_all(identity, lambda: self._store.aliases(tenant, name))
        seen = [alias_message(alias) for alias in aliases if identity.sees(alias.tenant, alias.name)]
        return pb.ListAliasesResponse(aliases=seen)

    @translate_errors
    async def Protect(self, request: pb.ProtectRequest, context: Context) -> pb.ProtectResponse:
        return pb.ProtectResponse(version=await self._protect(request.adapter, context, protected=True))

    @translate_errors
    async def Unprotect(self, request: pb.UnprotectRequest, context: Context) -> pb.UnprotectResponse:
        return pb.UnprotectResponse(version=await self._protect(request.adapter, context, protected=False))

    async def _protect(self, text: str, context: Context, *, protected: bool) -> pb.AdapterVersion:
        version = await self._calls.find(text, context, "protecting an adapter")
        ref = digest_ref(version)
        changed = await self._calls.change(
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
        return await self._calls.message(changed)
