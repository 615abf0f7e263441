"""A version in a listing: what fits in one line, so that a hundred thousand of them cost no manifests."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from adapter_store.errors import DataLoss
from adapter_store.manifest import Version, VersionState
from adapter_store.record import NameRecord

_DELETED = f" {VersionState.DELETED.value} "


@dataclass(frozen=True, slots=True)
class Summary:
    """`max_rank` and `num_bytes` are the manifest's, `base_model` is what the name's own push said."""

    tenant: str
    name: str
    digest: str
    created_at: float
    state: VersionState
    protected: bool
    quarantined: bool
    max_rank: int
    num_bytes: int
    aliases: tuple[str, ...]  # that point here, split ones too
    base_model: str

    @classmethod
    def of(cls, version: Version, aliases: Iterable[str] = ()) -> "Summary":
        return cls(
            version.tenant,
            version.name,
            version.digest,
            version.created_at,
            version.state,
            version.protected,
            version.quarantined,
            version.manifest.max_rank,
            version.manifest.num_bytes,
            tuple(aliases),
            version.push.base_model,
        )

    @property
    def key(self) -> str:
        """What listings are sorted by, and what `after` is compared with."""
        return f"{self.name}@{self.digest}"


def lines_of(name: str, record: NameRecord) -> Iterator[str]:
    """One for each version. Lines sort as their keys do, for a key and the blank behind it are unique."""
    pointing: dict[str, list[str]] = {}
    for alias in sorted(record.aliases):
        for digest in record.aliases[alias].targets:
            pointing.setdefault(digest, []).append(alias)
    for digest, entry in record.versions.items():
        flags = f"{entry.state.value} {entry.protected:d}{entry.quarantined:d}"
        sizes = f"{entry.created_at!r} {entry.max_rank} {entry.num_bytes}"
        aliases = ",".join(pointing.get(digest, ()))
        yield f"{name}@{digest} {flags} {sizes} {aliases} {entry.push.base_model}"


def parse_lines(tenant: str, lines: Iterable[str]) -> list[Summary]:
    """Raises DataLoss."""
    return [_parse(tenant, line) for line in lines]


def after_line(key: str) -> str:
    """Greater than the line of `key`, smaller than that of any greater key: all their characters are."""
    return f"{key}!"


def hex_of(line: str) -> str:
    """The hex part of its digest."""
    return line[: line.index(" ")].partition("@sha256:")[2]


def is_shown(line: str, deleted: bool) -> bool:
    """`deleted`: those that are DELETED, too."""
    return deleted or not is_deleted(line)


def is_deleted(line: str) -> bool:
    """Without the cost of parsing it."""
    return line.startswith(_DELETED, line.find(" "))


def _parse(tenant: str, line: str) -> Summary:
    try:
        key, state, flags, created, rank, size, aliases, base = line.split(" ", 7)
        name, _, digest = key.partition("@")
        return Summary(
            tenant,
            name,
            digest,
            float(created),
            VersionState(state),
            flags[0] == "1",
            flags[1] == "1",
            int(rank),
            int(size),
            tuple(aliases.split(",")) if aliases else (),
            base,
        )
    except (ValueError, IndexError) as error:
        raise DataLoss(f"a line of a listing is damaged: {error}") from error
