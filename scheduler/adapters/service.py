"""The Adapters service: operators' view of the store, as far as the caller sees it.

What a caller does not see is NOT_FOUND, whatever they may do. Reading the catalogue (Get, List, ListAliases)
needs no right, Push and Pull need "push", and the others "manage".
"""

from collections.abc import AsyncIterator
from contextlib import ExitStack

from lorafleet.v1 import adapters_pb2 as pb
from scheduler import audit
from scheduler.adapters.calls import Backends, Calls, Context, Limits, digest_ref, full_name
from scheduler.adapters.catalogue import Catalogue
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
from scheduler.adapters.wire import alias_message, push_target, version_message
from scheduler.admission.identity import PUSH
from scheduler.rpc_errors import translate_errors


class AdaptersService:
    """Push and Pull; the other calls of the wire are methods of two parts. All translate only."""

    def __init__(self, backends: Backends, limits: Limits) -> None:
        self._backends, self._max_push_bytes = backends, limits.max_push_bytes
        self._calls = calls = Calls(backends, limits)
        catalogue, upkeep = Catalogue(calls, backends), Upkeep(calls, backends, limits.delete_grace_s)
        self.Get, self.List, self.Delete = catalogue.Get, catalogue.List, catalogue.Delete
        self.SetAlias, self.DeleteAlias = catalogue.SetAlias, catalogue.DeleteAlias
        self.ListAliases = catalogue.ListAliases
        self.Protect, self.Unprotect = catalogue.Protect, catalogue.Unprotect
        self.Verify, self.Residency = upkeep.Verify, upkeep.Residency
        self.Pin, self.Unpin, self.Drop = upkeep.Pin, upkeep.Unpin, upkeep.Drop
        self.Drain, self.Activate = upkeep.Drain, upkeep.Activate
        self.DeleteDamaged, self.Collect = upkeep.DeleteDamaged, upkeep.Collect

    @translate_errors
    async def Push(
        self, request_iterator: AsyncIterator[pb.PushRequest], context: Context
    ) -> pb.PushResponse:
        identity = audit.caller()
        patience = Patience(self._backends.awake)
        header = await receive_header(request_iterator, patience)
        audit.asks_for(header.adapter)
        push = push_target(header, identity)
        with ExitStack() as held:
            held.enter_context(self._calls.one_transfer(identity))
            with disk_errors():
                place = await self._calls.transfer(self._backends.spool.place, identity.tenant)
                held.callback(place.give_back)
                limit = self._max_push_bytes
                await receive_files(request_iterator, place, limit, self._backends.spool.threads, patience)
            push = push.with_warnings(not_looked_for(header, place.folder))
            pushed = await self._calls.store_files(place, push, held.pop_all())
        dry_run = push.options.dry_run
        if not dry_run:
            audit.changed(context, "pushed", adapter=full_name(pushed.version), digest=pushed.version.digest)
        aliases = await self._calls.run(self._backends.store.aliases, push.tenant, push.name)
        response = pb.PushResponse(version=version_message(pushed.version, aliases), created=pushed.created)
        for alias in aliases:
            if alias.alias == push.options.alias and not dry_run:
                response.alias.CopyFrom(alias_message(alias))
        return response

    @translate_errors
    async def Pull(self, request: pb.PullRequest, context: Context) -> None:
        version = await self._calls.find(request.adapter, context, "downloading an adapter", right=PUSH)
        identity, patience = audit.caller(), Patience(self._backends.awake)
        with ExitStack() as held:
            held.enter_context(self._calls.one_transfer(identity))
            with disk_errors():
                place = await self._calls.transfer(self._backends.spool.place, identity.tenant)
                held.callback(place.give_back)
                place.take(version.manifest.num_bytes)
                await self._calls.transfer(self._backends.store.export, digest_ref(version), place.folder)
                pieces = read_files(place.folder)
                while (piece := await self._calls.transfer(next, pieces, None)) is not None:
                    await send_piece(context, piece, patience)
