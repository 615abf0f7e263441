"""The protocols of a store, each for those who share it, whatever the medium is.

A store is synchronous and thread-safe. Any method may raise StoreUnavailable when the medium fails.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from adapter_store.errors import InvalidRef
from adapter_store.lease import Lease
from adapter_store.manifest import AS_IT_COMES, Alias, Manifest, PushOptions, Version, VersionState
from adapter_store.model_spec import ModelSpec
from adapter_store.packed.form import Weights
from adapter_store.pushed import PushedFiles
from adapter_store.record import NameRecord, News
from adapter_store.ref import Ref
from adapter_store.summary import Summary


class WeightsSource(Protocol):
    """What executors need: the weights behind a digest."""

    def open(self, digest: str) -> Weights:
        """Raises AdapterNotFound, or DataLoss when the stored bytes do not match the digest."""
        ...


class Resolver(Protocol):
    """What is said of versions and aliases, which schedulers ask about for every request."""

    def record(self, tenant: str, name: str) -> NameRecord:
        """All that is known of a name, empty when it is unknown. Raises DataLoss."""
        ...

    def manifest(self, digest: str) -> Manifest:
        """Raises AdapterNotFound, DataLoss."""
        ...

    def resolve(self, ref: Ref, sticky_key: str | None = None) -> Version:
        """The version that a new request for `ref` gets. `sticky_key` is for aliases that split traffic: one
        key, one version, whoever asks (split.py); without one it is the version with the most weight.

        Raises AdapterNotFound, with one text for "unknown", "not this tenant's" and "not ACTIVE any more";
        DataLoss for a version in quarantine.
        """
        ...

    def find(self, ref: Ref) -> Version:
        """The version behind `ref` in whatever state. Raises AdapterNotFound."""
        ...

    def aliases(self, tenant: str, name: str | None = None) -> list[Alias]:
        """Sorted by name, then alias."""
        ...

    def active_names(self, digest: str) -> list[tuple[str, str]]:
        """(tenant, name) of all whose requests may get the content. Cheap: there is an index."""
        ...

    def news(self, since: int) -> News:
        """What changed after the number `since` of an earlier answer (-1: never asked). Cheap: it is asked
        several times a second. A change that was acknowledged before the call is in the answer."""
        ...


class NoticeBoard(Resolver, Protocol):
    """Where schedulers tell each other what they still use, and what tenants ask of them."""

    def hold(self, lease: Lease) -> None:
        """Tells what this holder still uses, in place of what it told before; it counts for the lease's
        seconds from now on. lease.py says what for."""
        ...

    def let_go(self, holder: str) -> None:
        """It uses nothing any more."""
        ...

    def leases(self) -> list[Lease]:
        """The leases of all holders, but for those that did not renew theirs in time."""
        ...

    def exchange(self, holder: str, text: str, seconds: float) -> dict[str, str] | None:
        """Tells other holders something in place of what this one told before, for so long by the store's
        clock ("": it tells nothing any more), and returns what all tell now. It may be lost in a crash. None:
        this medium is too slow for what is told twice a second, and nothing was told."""
        ...

    def secret(self) -> bytes:
        """32 random bytes, the same ones for all who ask, for as long as the store is there. They are made
        for the first one."""
        ...


class Publisher(WeightsSource, Resolver, Protocol):
    """What those need who bring versions: pushes and migrations."""

    def put(
        self, source: Path, tenant: str, name: str, spec: ModelSpec, options: PushOptions = AS_IT_COMES
    ) -> Version:
        """Checks a PEFT folder against the base and stores it, then moves the alias of `options` to it.

        Content is shared by all who push it; the files beside it, what they call the base, and warnings are
        the name's own. Pushing the same folder again yields the same version and changes nothing; the same
        content with other files replaces those. Raises InvalidAdapter, WarningsRefused, IncompatibleAdapter,
        InvalidRef, GenerationMismatch; then nothing was stored.
        """
        ...

    def pushed(self, ref: Ref) -> PushedFiles:
        """The files of the last push of that version under this name, without the weights.

        Raises AdapterNotFound, DataLoss.
        """
        ...

    def count(self, tenant: str) -> int:
        """Versions that are stored, those that are DELETED, too. Cheap."""
        ...

    def take_over(self, tenant: str, name: str, record: NameRecord) -> None:
        """What another store says of a name: the states, protections and times of the versions that are in
        both, and the aliases whose versions are all here. What an alias points to does not become DELETED."""
        ...

    def delete(self, ref: Ref) -> None:
        """Removes a version and its content at once, whoever may be reading it. An alias ref removes the
        version behind it, and that alias with it.

        Raises InUse while another alias points to the version or it is protected, AdapterNotFound.
        """
        ...


class Curator(Resolver, Protocol):
    """What operators need, who see, change and mend what is stored."""

    def tenants(self) -> list[str]:
        """All that have a version, sorted."""
        ...

    def summaries(
        self,
        tenant: str,
        *,
        name: str | None = None,
        after: str = "",
        limit: int = 100,
        deleted: bool = False,
    ) -> list[Summary]:
        """The first `limit` versions whose "name@digest" is greater than `after`, in that order, without
        manifests; `deleted`: those that are DELETED, too."""
        ...

    def set_alias(
        self, tenant: str, name: str, alias: str, digest: str, *, expected_generation: int | None = None
    ) -> Alias:
        """Points `alias` at an ACTIVE version of the same name. Already there: nothing changes.

        Raises AdapterNotFound, GenerationMismatch.
        """
        ...

    def split_alias(
        self,
        tenant: str,
        name: str,
        alias: str,
        targets: Mapping[str, int],
        *,
        expected_generation: int | None = None,
    ) -> Alias:
        """Does what set_alias does, at several versions: `targets` says how much of the traffic each gets, by
        digest.

        Raises InvalidRef, too, for weights that are not 1 to 1,000,000 or more than 16 targets.
        """
        ...

    def delete_alias(self, tenant: str, name: str, alias: str) -> None:
        """Raises AdapterNotFound."""
        ...

    def set_protected(self, tenant: str, name: str, digest: str, protected: bool) -> Version:
        """Raises AdapterNotFound."""
        ...

    def withdraw(
        self,
        ref: Ref,
        state: VersionState = VersionState.DELETED,
        *,
        force: bool = False,
        end_requests: bool = False,
    ) -> Version:
        """No new request gets the version any more; its bytes stay, for those that were accepted before.

        DELETED is refused while a protection or another alias than that in `ref` holds it; `force` lifts
        them. `end_requests` tells schedulers to end what they accepted, too. Pushing the content again makes
        it ACTIVE. Raises InUse, AdapterNotFound (also when it is DELETED already).
        """
        ...

    def activate(self, ref: Ref) -> Version:
        """Takes new requests of a DRAINING version again. ACTIVE already: nothing changes.

        Raises AdapterNotFound, also when it is DELETED: only pushing the content brings that back.
        """
        ...

    def collect(
        self, grace_s: float, keep: Callable[[Summary], bool], *, dry_run: bool = False
    ) -> list[Summary]:
        """Removes the versions of all tenants that have been DELETED for `grace_s` seconds by the store's
        clock and that `keep` does not hold, with the content that no other name has. Returns them."""
        ...

    def export(self, ref: Ref, target: Path) -> None:
        """Writes the files of the last push of that version under this name into `target`, a folder that is
        made if need be.

        Raises AdapterNotFound, DataLoss, or FileExistsError when `target` is not empty.
        """
        ...

    def verify(self, ref: Ref) -> Version:
        """Hashes everything stored for the version again. Raises AdapterNotFound, DataLoss."""
        ...

    def upload(self, ref: Ref) -> str:
        """Names what is stored for the version in a digest ref now: a push that repairs it makes another.
        "": nothing that can be read."""
        ...

    def set_quarantined(
        self, tenant: str, name: str, digest: str, quarantined: bool, *, upload: str | None = None
    ) -> bool:
        """A version in quarantine is refused as DataLoss. A push of its content ends that, too.

        With `upload`, only while that is what is stored; else False, and nothing changed. Raises
        AdapterNotFound, DataLoss.
        """
        ...

    def orphans(self) -> list[str]:
        """What is stored and what no version names: digests of content, or what else tells where it is. A
        push that is under way is none. Takes time in proportion to all that is stored."""
        ...

    def damaged(self, tenant: str) -> list[str]:
        """Names whose records cannot be read: their versions are DATA_LOSS and in no listing."""
        ...

    def delete_damaged(self, tenant: str, name: str, *, dry_run: bool = False) -> list[Summary]:
        """Gives up a name whose record cannot be read: all content that is stored for it becomes DELETED
        under it, so that `collect` removes it in its time, and its aliases are forgotten. What becomes so; a
        dry run only tells. Takes time in proportion to all versions that are stored.

        Raises AdapterNotFound when that record can be read, or there is none.
        """
        ...


class AdapterStore(NoticeBoard, Publisher, Curator, Protocol):
    """All of a store. Whoever needs a part of it takes that part."""

    def problem(self) -> str:
        """Why it takes no changes, or "": its medium may lose what is stored. Cheap: as it was last seen."""
        ...


def open_store(url: str, *, create: bool = True, allow_volatile: bool = False) -> AdapterStore:
    """`disk:/folder`, a bare path, or `redis://...`, `rediss://...` (redis_store/url.py).

    `create` makes a store where none is. `allow_volatile` accepts a Redis that may lose in a crash what it
    acknowledged. Raises InvalidRef for another scheme, NoStore, OtherFormat, StoreUnavailable.
    """
    from adapter_store.disk_store.store import DiskStore

    folder = folder_of(url)
    return _open_redis(url, create, allow_volatile) if folder is None else DiskStore(folder, create=create)


def folder_of(url: str) -> Path | None:
    """The folder of a store's url; None for a Redis. Raises InvalidRef, which quotes nothing, for another
    scheme: it may be a Redis's url with a password in it that was misspelt. So a path that looks like one
    needs "disk:"."""
    scheme, colon, rest = url.partition(":")
    if colon and scheme in ("redis", "rediss"):
        return None
    if not colon or "/" in scheme:
        scheme, rest = "disk", url
        if "@" in url and (colon or not url.startswith(("/", "."))):
            raise InvalidRef(
                "store url: it has an @ and is not redis://...; a folder of such a name is disk:..."
            )
    if scheme != "disk" or not rest:
        raise InvalidRef("store url: it is not disk:/folder, a path, redis://... or rediss://...")
    return Path(rest)


def _open_redis(url: str, create: bool, allow_volatile: bool) -> AdapterStore:
    try:
        from adapter_store.redis_store.store import RedisStore
        from adapter_store.redis_store.url import RedisUrl
    except ModuleNotFoundError as error:
        raise InvalidRef(
            f"store url redis://... needs the package {error.name}: pip install 'lorafleet[redis]'"
        ) from error
    return RedisStore(RedisUrl.parse(url, allow_volatile=allow_volatile), create=create)
