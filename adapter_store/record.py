"""What a store knows about one (tenant, name): pure values; every change makes a new record.

A store keeps each record as one unit, so a change is seen whole or not at all.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from adapter_store.errors import AdapterNotFound, DataLoss, GenerationMismatch, InUse
from adapter_store.ref import Ref


@dataclass(frozen=True, slots=True)
class VersionEntry:
    created_at: float
    protected: bool = False


@dataclass(frozen=True, slots=True)
class AliasEntry:
    digest: (
        str | None
    )  # None: deleted. The generation stays, so a stale caller cannot mistake a new one for it
    generation: int


@dataclass(frozen=True, slots=True)
class NameRecord:
    versions: Mapping[str, VersionEntry] = field(default_factory=dict)
    aliases: Mapping[str, AliasEntry] = field(default_factory=dict)

    def digest_of(self, ref: Ref) -> str:
        """Raises AdapterNotFound; its text says nothing about what else exists."""
        entry = self.aliases.get(ref.alias) if ref.alias is not None else None
        digest = entry.digest if entry is not None else ref.digest
        if digest is None or digest not in self.versions:
            raise not_found(ref)
        return digest

    def aliases_of(self, digest: str) -> list[str]:
        return sorted(alias for alias, entry in self.aliases.items() if entry.digest == digest)

    def with_version(self, digest: str, now: float) -> "NameRecord":
        if digest in self.versions:
            return self
        return replace(self, versions={**self.versions, digest: VersionEntry(now)})

    def with_protection(self, ref: Ref, protected: bool) -> "NameRecord":
        digest = self.digest_of(ref)
        entry = replace(self.versions[digest], protected=protected)
        return replace(self, versions={**self.versions, digest: entry})

    def with_alias(self, alias: str, ref: Ref, expected_generation: int | None) -> "NameRecord":
        """`alias` at the version that `ref` names. An absent alias has generation 0."""
        digest = self.digest_of(ref)
        old = self.aliases.get(alias, AliasEntry(None, 0))
        seen = old.generation if old.digest is not None else 0
        if expected_generation is not None and expected_generation != seen:
            raise GenerationMismatch(
                f"alias {ref.tenant}/{ref.name}@{alias} is at generation {seen}, not {expected_generation}: "
                "look at it again before moving it"
            )
        if old.digest == digest:
            return self
        return replace(self, aliases={**self.aliases, alias: AliasEntry(digest, old.generation + 1)})

    def without_alias(self, alias: str, ref: Ref) -> "NameRecord":
        """`ref` is the alias's own, for the error."""
        self.digest_of(ref)
        return self._dropping(alias)

    def without_version(self, ref: Ref) -> "NameRecord":
        """Raises InUse while anything but the alias in `ref` itself points to the version."""
        digest = self.digest_of(ref)
        if self.versions[digest].protected:
            raise InUse(f"{ref} is protected: unprotect it first")
        holders = [alias for alias in self.aliases_of(digest) if alias != ref.alias]
        if holders:
            raise InUse(f"{ref} is what alias {holders[0]!r} points to: move or delete the alias first")
        record = self._dropping(ref.alias) if ref.alias is not None else self
        return replace(record, versions={d: v for d, v in record.versions.items() if d != digest})

    def _dropping(self, alias: str) -> "NameRecord":
        gone = AliasEntry(None, self.aliases[alias].generation)
        return replace(self, aliases={**self.aliases, alias: gone})

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "NameRecord":
        """Raises DataLoss."""
        try:
            fields = json.loads(text)
            versions = {digest: VersionEntry(**entry) for digest, entry in fields["versions"].items()}
            aliases = {alias: AliasEntry(**entry) for alias, entry in fields["aliases"].items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataLoss(f"a stored record of versions and aliases is damaged: {error!r}") from error
        return cls(versions, aliases)


def not_found(ref: Ref) -> AdapterNotFound:
    return AdapterNotFound(f"adapter {ref} was not found")
