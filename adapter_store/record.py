"""What a store knows about one (tenant, name): pure values; every change makes a new record.

A store keeps each record as one unit, so a change is seen whole or not at all.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from adapter_store.errors import AdapterNotFound, DataLoss, GenerationMismatch, InUse, InvalidRef
from adapter_store.manifest import Manifest, PushFacts, PushWarning, VersionState
from adapter_store.ref import Ref
from adapter_store.split import choose

_NO_FACTS = PushFacts()
MAX_WEIGHT = 1_000_000
MAX_TARGETS = 16


@dataclass(frozen=True, slots=True)
class News:
    """What changed after a number that was told before, up to `number`.

    `names` are the (tenant, name) pairs whose records changed, perhaps some more; None: any may have.
    """

    number: int
    names: frozenset[tuple[str, str]] | None


@dataclass(frozen=True, slots=True)
class VersionEntry:
    """`left_at` is when it left ACTIVE (unix seconds; 0: it has not), `ends_requests` whether requests that
    were accepted before end with it, `quarantined` whether its bytes were found damaged. `max_rank` and
    `num_bytes` are from its manifest, so that listings need none."""

    created_at: float
    protected: bool = False
    state: VersionState = VersionState.ACTIVE
    left_at: float = 0.0
    ends_requests: bool = False
    quarantined: bool = False
    max_rank: int = 0
    num_bytes: int = 0
    push: PushFacts = _NO_FACTS


@dataclass(frozen=True, slots=True)
class AliasEntry:
    digest: (
        str | None
    )  # None: deleted. The generation stays, so a stale caller cannot mistake a new one for it
    generation: int
    weights: Mapping[str, int] = field(default_factory=dict)  # of a split alias; `digest` has the most

    @property
    def targets(self) -> Mapping[str, int]:
        """Weight by digest; nothing when the alias is deleted."""
        return self.weights or ({} if self.digest is None else {self.digest: 1})


@dataclass(frozen=True, slots=True)
class NameRecord:
    versions: Mapping[str, VersionEntry] = field(default_factory=dict)
    aliases: Mapping[str, AliasEntry] = field(default_factory=dict)

    def digest_of(self, ref: Ref) -> str:
        """In whatever state it is; of a split alias the version with the most weight.

        Raises AdapterNotFound; its text says nothing about what else exists.
        """
        entry = self.aliases.get(ref.alias) if ref.alias is not None else None
        digest = entry.digest if entry is not None else ref.digest
        if digest is None or digest not in self.versions:
            raise not_found(ref)
        return digest

    def active_digest_of(self, ref: Ref, sticky_key: str | None, *, resumed: bool = False) -> str:
        """What a new request gets: of a split alias, `sticky_key` decides (None: as digest_of).

        `resumed`: it goes on with what was accepted before, so that a version in any state will do, unless
        its withdrawal ends accepted requests, too. Raises AdapterNotFound, also for what has left ACTIVE,
        and DataLoss for what is in quarantine.
        """
        alias = self.aliases.get(ref.alias) if ref.alias is not None else None
        digest = self.digest_of(ref)
        if alias is not None and alias.weights:
            shares = {d: w for d, w in alias.weights.items() if self.takes_requests(d)}
            if shares and (sticky_key is not None or digest not in shares):
                digest = choose(f"{ref.tenant}/{ref.name}@{ref.alias}", shares, sticky_key or "")
        if not (self.takes_requests(digest) or (resumed and not self.versions[digest].ends_requests)):
            raise not_found(ref)
        if self.versions[digest].quarantined:
            raise DataLoss(f"{ref.tenant}/{ref.name}@{digest} is damaged: push the adapter again")
        return digest

    def takes_requests(self, digest: str) -> bool:
        return digest in self.versions and self.versions[digest].state is VersionState.ACTIVE

    def push_files(self) -> set[str]:
        """Which sets of pushed files are named here."""
        return {entry.push.files for entry in self.versions.values() if entry.push.files}

    def aliases_of(self, digest: str) -> list[str]:
        return sorted(alias for alias, entry in self.aliases.items() if digest in entry.targets)

    def with_version(self, manifest: Manifest, push: PushFacts, now: float) -> "NameRecord":
        """A version that is there already is ACTIVE again, and healthy: its content was just checked."""
        old = self.versions.get(manifest.digest, VersionEntry(now))
        entry = VersionEntry(
            old.created_at,
            old.protected,
            max_rank=manifest.max_rank,
            num_bytes=manifest.num_bytes,
            push=push,
        )
        return self if old == entry else self._with_entry(manifest.digest, entry)

    def with_protection(self, ref: Ref, protected: bool) -> "NameRecord":
        digest = self.digest_of(ref)
        if self.versions[digest].state is VersionState.DELETED:
            raise not_found(ref)
        return self._with_entry(digest, replace(self.versions[digest], protected=protected))

    def with_quarantine(self, ref: Ref, quarantined: bool) -> "NameRecord":
        digest = self.digest_of(ref)
        return self._with_entry(digest, replace(self.versions[digest], quarantined=quarantined))

    def with_alias(
        self, ref: Ref, targets: Mapping[str, int], expected_generation: int | None
    ) -> "NameRecord":
        """The alias in `ref` at versions, by weight. An absent alias has generation 0.

        Raises AdapterNotFound, InvalidRef for weights, GenerationMismatch.
        """
        alias = str(ref.alias)
        _check_targets(targets)
        for digest in targets:
            if digest not in self.versions or not self.takes_requests(digest):
                raise not_found(Ref(ref.tenant, ref.name, digest=digest))
        old = self.aliases.get(alias, AliasEntry(None, 0))
        seen = old.generation if old.digest is not None else 0
        if expected_generation is not None and expected_generation != seen:
            raise GenerationMismatch(
                f"alias {ref} is at generation {seen}, not {expected_generation}: "
                "look at it again before moving it"
            )
        new = _entry(targets, old.generation + 1)
        if (old.digest, dict(old.weights)) == (new.digest, new.weights):
            return self
        return replace(self, aliases={**self.aliases, alias: new})

    def taking_over(self, other: "NameRecord") -> "NameRecord":
        """The record with what `other` says of the versions that are here, too, and with its aliases of
        these. A version that an alias points to stays as it is here where `other` has DELETED it. Pushes are
        this store's."""
        aliases = {
            alias: entry
            for alias, entry in other.aliases.items()
            if all(digest in self.versions for digest in entry.targets)
        }
        new = replace(self, aliases={**self.aliases, **aliases})
        told = {
            digest: replace(entry, push=self.versions[digest].push)
            for digest, entry in other.versions.items()
            if digest in self.versions
            and not (entry.state is VersionState.DELETED and new.aliases_of(digest))
        }
        return replace(new, versions={**self.versions, **told})

    def without_alias(self, alias: str, ref: Ref) -> "NameRecord":
        """`ref` is the alias's own, for the error."""
        self.digest_of(ref)
        return self._dropping(alias)

    def withdrawn(
        self, ref: Ref, state: VersionState, now: float, *, force: bool, end_requests: bool
    ) -> "NameRecord":
        """The version behind `ref` DRAINING or DELETED. An alias ref that deletes takes its alias with it.

        Raises InUse, unless forced, when it shall be deleted and another alias or a protection holds it;
        AdapterNotFound when it is DELETED already.
        """
        digest = self.digest_of(ref)
        old = self.versions[digest]
        if old.state is VersionState.DELETED:
            raise not_found(ref)
        record = self
        if state is VersionState.DELETED:
            if not force:
                self._check_free(ref, digest)
            record = self._letting_go(digest)
        entry = replace(
            old,
            protected=old.protected and state is not VersionState.DELETED,
            state=state,
            left_at=old.left_at or now,
            ends_requests=end_requests,
        )
        return record._with_entry(digest, entry)

    def activated(self, ref: Ref) -> "NameRecord":
        """Takes requests of a DRAINING version again. Raises AdapterNotFound when it is DELETED."""
        digest = self.digest_of(ref)
        entry = self.versions[digest]
        if entry.state is VersionState.DELETED:
            raise not_found(ref)
        active = replace(entry, state=VersionState.ACTIVE, left_at=0.0, ends_requests=False)
        return self if entry == active else self._with_entry(digest, active)

    @classmethod
    def of_damaged(cls, contents: Mapping[str, Manifest | None], now: float) -> "NameRecord":
        """In place of one that cannot be read: all that is stored for its name, by digest, is DELETED. None:
        of that the manifest cannot be read, either."""
        return cls(
            {
                digest: VersionEntry(
                    now,
                    state=VersionState.DELETED,
                    left_at=now,
                    max_rank=manifest.max_rank if manifest else 0,
                    num_bytes=manifest.num_bytes if manifest else 0,
                )
                for digest, manifest in contents.items()
            }
        )

    def without_version(self, ref: Ref) -> "NameRecord":
        """Raises InUse while anything but the alias in `ref` itself points to the version."""
        digest = self.digest_of(ref)
        self._check_free(ref, digest)
        record = self._dropping(ref.alias) if ref.alias is not None else self
        return replace(record, versions={d: v for d, v in record.versions.items() if d != digest})

    def buried(self, ref: Ref, before: float) -> "NameRecord":
        """Without a version that has been DELETED since `before`. Raises AdapterNotFound for any other."""
        entry = self.versions[self.digest_of(ref)]
        if entry.state is not VersionState.DELETED or entry.left_at > before:
            raise not_found(ref)
        return self.without_version(ref)

    def _check_free(self, ref: Ref, digest: str) -> None:
        holders = [alias for alias in self.aliases_of(digest) if alias != ref.alias]
        if ref.alias is not None and self.aliases[ref.alias].weights:
            raise InUse(f"{ref} is split over several versions: name one by its digest")
        if self.versions[digest].protected:
            raise InUse(f"{ref} is protected: unprotect it first")
        if holders:
            raise InUse(f"{ref} is what alias {holders[0]!r} points to: move or delete the alias first")

    def _with_entry(self, digest: str, entry: VersionEntry) -> "NameRecord":
        return replace(self, versions={**self.versions, digest: entry})

    def _dropping(self, alias: str) -> "NameRecord":
        gone = AliasEntry(None, self.aliases[alias].generation)
        return replace(self, aliases={**self.aliases, alias: gone})

    def _letting_go(self, digest: str) -> "NameRecord":
        """Without the aliases that point to one version only, and without its share of split ones."""
        record = self
        for alias in self.aliases_of(digest):
            entry = self.aliases[alias]
            left = {other: weight for other, weight in entry.weights.items() if other != digest}
            new = _entry(left, entry.generation + 1) if left else AliasEntry(None, entry.generation)
            record = replace(record, aliases={**record.aliases, alias: new})
        return record

    def to_json(self) -> str:
        return json.dumps(_told(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "NameRecord":
        """Raises DataLoss."""
        try:
            fields = json.loads(text)
            versions = {digest: _version_entry(entry) for digest, entry in fields["versions"].items()}
            aliases = {alias: AliasEntry(**entry) for alias, entry in fields["aliases"].items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataLoss(f"a stored record of versions and aliases is damaged: {error!r}") from error
        return cls(versions, aliases)


@contextlib.contextmanager
def naming(tenant: str, name: str) -> Iterator[None]:
    """What goes wrong while a record is read says whose it is, and what can be done."""
    try:
        yield
    except DataLoss as error:
        raise DataLoss(
            f"what the store says of {tenant}/{name} is damaged: `lorafleet adapters rm-damaged` gives it up"
        ) from error


def not_found(ref: Ref) -> AdapterNotFound:
    return AdapterNotFound(f"adapter {ref} was not found")


def _entry(targets: Mapping[str, int], generation: int) -> AliasEntry:
    main = max(sorted(targets), key=lambda digest: targets[digest])
    return AliasEntry(main, generation, dict(sorted(targets.items())) if len(targets) > 1 else {})


def _told(value: Any) -> Any:
    """Fields as JSON has it: records are read often, so what is as it mostly is takes no place in them."""
    if isinstance(value, Mapping):
        return {key: _told(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_told(each) for each in value]
    if not is_dataclass(value):
        return value
    known = ((each.name, getattr(value, each.name), each.default) for each in fields(value))
    return {name: _told(found) for name, found, usual in known if found != usual}


def _version_entry(told: dict[str, Any]) -> VersionEntry:
    if "state" in told:
        told["state"] = VersionState(told["state"])
    if "push" in told:
        push = told["push"]
        warnings = tuple(PushWarning(**warning) for warning in push.get("warnings", ()))
        told["push"] = PushFacts(**{**push, "warnings": warnings})
    return VersionEntry(**told)


def _check_targets(targets: Mapping[str, int]) -> None:
    if not 1 <= len(targets) <= MAX_TARGETS:
        raise InvalidRef(f"an alias has 1 to {MAX_TARGETS} targets, not {len(targets)}")
    for digest, weight in targets.items():
        if not 1 <= weight <= MAX_WEIGHT:
            raise InvalidRef(f"the weight of {digest} is {weight}, not 1 to {MAX_WEIGHT}")
