"""What all calls of the Adapters service do: find caller and version, and ask the store in a thread."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

import grpc

import adapter_store
from adapter_store import Curator, ModelSpec, Ref, Summary, Version, VersionState
from lorafleet.doors.held import Held
from lorafleet.v1 import adapters_pb2 as pb
from scheduler import audit
from scheduler.adapters.ingest import Ingest, Push, Pushed
from scheduler.adapters.pinning import Copies
from scheduler.adapters.retirement import Retirement
from scheduler.adapters.spool import Place, Spool
from scheduler.adapters.wire import version_message
from scheduler.admission.identity import MANAGE, OPERATE, Identity
from scheduler.admission.lookup import find_version, parse_ref, require
from scheduler.admission.quarantine import Quarantine
from scheduler.admission.versions import Versions
from scheduler.errors import AdapterNotFound, TooMuchHeld

MAX_PUSH_BYTES = 8 * 1024**3
MAX_TRANSFERS, MAX_TENANT_TRANSFERS = 8, 4
MAX_LISTINGS = 5  # At once, 7 for moments (Held): of the pool's 8 threads some are left for others.
DELETE_GRACE_S = 60.0
PAGE = 1000

T = TypeVar("T")
Context: TypeAlias = grpc.aio.ServicerContext


@dataclass(frozen=True, slots=True)
class Backends:
    """What the service works with."""

    store: Curator
    spec: ModelSpec
    ingest: Ingest
    versions: Versions
    copies: Copies
    retirement: Retirement
    pool: Executor  # Its size bounds how many calls the store sees at once.
    quarantine: Quarantine
    spool: Spool  # Its threads are for what takes long: Push, Pull and Verify.
    listings: Held  # Calls that read all of a tenant, of the other services, too.
    awake: Callable[[], float] = time.monotonic  # On which clients are waited for.


@dataclass(frozen=True, slots=True)
class Limits:
    """Push, Pull and Verify take long: `max_transfers` run at once, `tenant_transfers` of one tenant."""

    max_push_bytes: int = MAX_PUSH_BYTES
    max_transfers: int = MAX_TRANSFERS
    tenant_transfers: Callable[[str], int] = lambda tenant: MAX_TENANT_TRANSFERS
    delete_grace_s: float = DELETE_GRACE_S


def held_listings(share: Callable[[str], int]) -> Held:
    """The bound for calls that read all of a tenant."""
    too_many = partial(TooMuchHeld, "TOO_MANY_LISTINGS")
    return Held("listings", MAX_LISTINGS, too_many, share)


class Calls:
    """A cancelled call leaves its thread to finish."""

    def __init__(self, backends: Backends, limits: Limits) -> None:
        self._backends, self._store = backends, backends.store
        self._storing: set[asyncio.Task[Pushed]] = set()
        self._transferring = Held(
            "adapters that are pushed, pulled or verified",
            limits.max_transfers,
            partial(TooMuchHeld, "TOO_MANY_TRANSFERS"),
            limits.tenant_transfers,
        )

    async def find(
        self,
        text: str,
        context: Context,
        what: str | None = None,
        *,
        right: str = MANAGE,
        field: str = "adapter",
    ) -> Version:
        """The version, if the caller sees it; `what` says what they need the right for, None that they need
        none. DELETED ones are not found: only their bytes are left."""
        audit.asks_for(text)
        identity = audit.caller()
        ref = parse_ref(text, identity, field)
        version: Version = await self.run(find_version, self._store.find, ref, identity, text)
        if version.state is VersionState.DELETED:
            raise AdapterNotFound(text)
        if what is not None:
            require(identity, right, what)
        return version

    async def change(self, text: str, ref: Ref, change: Callable[[], T]) -> T:
        """A change of the name in `ref`. What another call removed in between is not found, with the caller's
        own words."""
        try:
            return await self.run(change)
        except adapter_store.AdapterNotFound:
            raise AdapterNotFound(text) from None
        finally:
            self._backends.versions.forget(ref.tenant, ref.name)

    async def message(self, version: Version) -> pb.AdapterVersion:
        return version_message(version, await self.run(self._store.aliases, version.tenant, version.name))

    async def run(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._backends.pool, call, *arguments)

    async def transfer(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(
            self._backends.spool.threads, call, *arguments
        )

    async def list_all(self, identity: Identity, call: Callable[[], T]) -> T:
        """Does what `run` does, of what reads all of a tenant. Raises TooMuchHeld."""
        with self._backends.listings.one(identity.tenant):
            return await self.run(call)

    def one_transfer(self, identity: Identity) -> AbstractContextManager[None]:
        """Raises TooMuchHeld."""
        return self._transferring.one(identity.tenant)

    async def store_files(self, place: Place, push: Push, held: ExitStack) -> Pushed:
        """What is `held` stays so until they are stored, or cannot be: also when their sender is gone."""

        async def store() -> Pushed:
            with held:
                pushed = await self._backends.ingest.put(place.folder, push, self._backends.spec)
            self._backends.versions.forget(push.tenant, push.name)
            return pushed

        storing = asyncio.create_task(store())
        self._storing.add(storing)
        storing.add_done_callback(self._stored)
        return await asyncio.shield(storing)

    def _stored(self, storing: asyncio.Task[Pushed]) -> None:
        self._storing.discard(storing)
        if not storing.cancelled():
            storing.exception()  # Its caller may be gone, whom it would have been told.

    def tenants(self, identity: Identity) -> list[str]:
        """Whose adapters a call without a ref is about: the caller's own, of who sees and operates everything
        all. Blocking."""
        everybody = identity.sees_everything and OPERATE in identity.rights
        return self._store.tenants() if everybody else [identity.tenant]

    def seen(self, identity: Identity) -> Iterator[Summary]:
        """All versions of these tenants, as far as the caller sees them. Blocking."""
        for tenant in self.tenants(identity):
            after = ""
            while page := self._store.summaries(tenant, after=after, limit=PAGE):
                yield from (each for each in page if identity.sees(each.tenant, each.name))
                after = page[-1].key


def full_name(named: Version | Summary | Ref) -> str:
    return f"{named.tenant}/{named.name}"


def digest_ref(version: Version | Summary) -> Ref:
    return Ref(version.tenant, version.name, digest=version.digest)
