"""The Adapters service's calls about bytes and copies: are they whole, where are they, which may go.

What is about one adapter needs "manage"; Verify and Collect, which read or remove bytes for all, "operate".
"""

import adapter_store
from adapter_store import Summary, VersionState
from lorafleet.v1 import adapters_pb2 as pb
from scheduler import audit
from scheduler.adapters.calls import Backends, Calls, Context, digest_ref, full_name
from scheduler.admission.identity import MANAGE, OPERATE, Identity
from scheduler.admission.lookup import parse_ref, require
from scheduler.errors import AdapterNotFound, InvalidRequest
from scheduler.fleet.residency import Tier
from scheduler.rpc_errors import translate_errors


class Upkeep:
    def __init__(self, calls: Calls, backends: Backends, delete_grace_s: float) -> None:
        self._calls, self._delete_grace_s = calls, delete_grace_s
        self._store, self._copies = backends.store, backends.copies
        self._retirement, self._quarantine = backends.retirement, backends.quarantine

    @translate_errors
    async def Verify(self, request: pb.VerifyRequest, context: Context) -> pb.VerifyResponse:
        identity = audit.caller()
        response = pb.VerifyResponse()
        damaged: dict[str, list[str]] = {}  # all names to push again, by digest
        if request.adapter:
            version = await self._calls.find(request.adapter, context, "verifying an adapter", right=OPERATE)
            checked = [Summary.of(version)]
        else:
            require(identity, OPERATE, "verifying adapters")
            checked = await self._calls.list_all(identity, lambda: list(self._calls.seen(identity)))
        with self._calls.one_transfer(identity):
            for summary in checked:
                problem = await self._calls.transfer(self._quarantine.check, digest_ref(summary))
                if problem:
                    audit.changed(context, "found damaged", adapter=full_name(summary), digest=summary.digest)
                    names = damaged.setdefault(summary.digest, [])
                    names.append(full_name(summary))
                    response.damaged[summary.digest] = f"{', '.join(names)}: {problem}"
                response.verified += 1
            if not request.adapter:
                await self._look_at_records(identity, response)
            if not request.adapter and identity.sees_everything:
                response.orphans.extend(await self._calls.run(self._store.orphans))
        return response

    @translate_errors
    async def Residency(self, request: pb.ResidencyRequest, context: Context) -> pb.ResidencyResponse:
        """Without an adapter: the copies of the versions of the caller's tenant, or, for those who see and
        operate everything, of all."""
        identity = audit.caller()
        if request.adapter:
            known = [Summary.of(await self._calls.find(request.adapter, context, "looking at executors"))]
        else:
            require(identity, MANAGE, "looking at executors")
            resident = self._copies.resident()
            known = await self._calls.list_all(
                identity, lambda: [each for each in self._calls.seen(identity) if each.digest in resident]
            )
        sharing: dict[str, list[Summary]] = {}
        for each in known:
            sharing.setdefault(each.digest, []).append(each)
        rows = [row for row in self._copies.rows() if row.digest in sharing]
        for row in rows:
            row.max_rank = sharing[row.digest][0].max_rank
            row.adapters.extend(map(full_name, sharing[row.digest]))
        rows.sort(key=lambda row: (row.executor, row.digest, row.tier))
        return pb.ResidencyResponse(copies=rows)

    @translate_errors
    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        version = await self._calls.find(request.adapter, context, "pinning an adapter")
        if request.tier not in (pb.RESIDENCY_TIER_HOST, pb.RESIDENCY_TIER_SLOT):
            raise InvalidRequest("tier", "is neither HOST nor SLOT")
        self._copies.check(request.executors)
        audit.changed(context, "pinned", adapter=full_name(version), digest=version.digest)
        pinned, missing = await self._copies.pin(
            version.digest, full_name(version), Tier(request.tier), request.executors
        )
        return pb.PinResponse(digest=version.digest, pinned=pinned, missing=missing)

    @translate_errors
    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:
        version = await self._calls.find(request.adapter, context, "unpinning an adapter")
        self._copies.check(request.executors)
        self._copies.unpin(version.digest, full_name(version), request.executors)
        audit.changed(context, "unpinned", adapter=full_name(version), digest=version.digest)
        return pb.UnpinResponse(digest=version.digest)

    @translate_errors
    async def Drop(self, request: pb.DropCopiesRequest, context: Context) -> pb.DropCopiesResponse:
        version = await self._calls.find(request.adapter, context, "dropping the copies of an adapter")
        self._copies.check(request.executors)
        audit.changed(context, "copies dropped", adapter=full_name(version), digest=version.digest)
        shared = bool(await self._retirement.sharers(full_name(version), version.digest))
        remaining = await self._copies.drop(version.digest, full_name(version), request.executors, shared)
        return pb.DropCopiesResponse(digest=version.digest, remaining=remaining)

    @translate_errors
    async def Drain(self, request: pb.DrainAdapterRequest, context: Context) -> pb.DrainAdapterResponse:
        version = await self._calls.find(request.adapter, context, "draining an adapter")
        ref = digest_ref(version)
        await self._calls.change(
            request.adapter, ref, lambda: self._store.withdraw(ref, VersionState.DRAINING)
        )
        audit.changed(context, "drained", adapter=full_name(version), digest=version.digest)
        await self._retirement.drained(full_name(version), version.digest)
        return pb.DrainAdapterResponse(digest=version.digest, unreachable=self._copies.unreachable())

    @translate_errors
    async def Activate(self, request: pb.ActivateRequest, context: Context) -> pb.ActivateResponse:
        version = await self._calls.find(request.adapter, context, "activating an adapter")
        ref = digest_ref(version)
        active = await self._calls.change(request.adapter, ref, lambda: self._store.activate(ref))
        audit.changed(context, "activated", adapter=full_name(version), digest=version.digest)
        return pb.ActivateResponse(version=await self._calls.message(active))

    @translate_errors
    async def DeleteDamaged(
        self, request: pb.DeleteDamagedRequest, context: Context
    ) -> pb.DeleteDamagedResponse:
        identity = audit.caller()
        audit.asks_for(request.adapter)
        ref = parse_ref(request.adapter, identity)
        if "@" in request.adapter:
            raise InvalidRequest("adapter", "must be [tenant/]name: all of its versions go")
        if not identity.sees(ref.tenant, ref.name):
            raise AdapterNotFound(request.adapter)
        require(identity, MANAGE, "deleting a damaged adapter")
        adapter = full_name(ref)

        def delete() -> list[Summary]:
            try:
                return self._store.delete_damaged(ref.tenant, ref.name, dry_run=request.dry_run)
            except adapter_store.AdapterNotFound:
                if self._store.record(ref.tenant, ref.name).versions:
                    raise InvalidRequest("adapter", f"{adapter} is not damaged: use Delete") from None
                raise

        gone = await self._calls.change(request.adapter, ref, delete)
        if not request.dry_run:
            audit.changed(context, "damaged name deleted", adapter=adapter)
        return pb.DeleteDamagedResponse(
            adapter=adapter,
            digests=[summary.digest for summary in gone],
            num_bytes=sum(summary.num_bytes for summary in gone),
        )

    @translate_errors
    async def Collect(self, request: pb.CollectRequest, context: Context) -> pb.CollectResponse:
        """Frees the bytes of all tenants' versions, but only those that the caller sees."""
        identity = audit.caller()
        require(identity, OPERATE, "collecting deleted adapters")
        needed = await self._retirement.needed(self._copies.resident())

        def keep(summary: Summary) -> bool:
            return not identity.sees(summary.tenant, summary.name) or needed(summary)

        dry_run = request.dry_run
        gone = await self._calls.list_all(
            identity, lambda: self._store.collect(self._delete_grace_s, keep, dry_run=dry_run)
        )
        for summary in () if dry_run else gone:
            audit.changed(context, "collected", adapter=full_name(summary), digest=summary.digest)
        return pb.CollectResponse(
            digests=[summary.digest for summary in gone],
            num_bytes=sum(summary.num_bytes for summary in gone),
            adapters=[full_name(summary) for summary in gone],
        )

    async def _look_at_records(self, identity: Identity, response: pb.VerifyResponse) -> None:
        """Looks at records as far as the caller sees them. A damaged one is in no listing."""

        def damaged() -> list[str]:
            tenants = self._calls.tenants(identity)
            found = [(tenant, name) for tenant in tenants for name in self._store.damaged(tenant)]
            return [f"{tenant}/{name}" for tenant, name in found if identity.sees(tenant, name)]

        for adapter in await self._calls.run(damaged):
            response.damaged[adapter] = f"what the store says of {adapter} is damaged"
            self._quarantine.found_damage()
