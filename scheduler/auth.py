"""Who calls, and what they may do."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

INFER = "infer"
ADMIN = "admin"
RIGHTS = frozenset({INFER, ADMIN})
DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller. `adapters` are glob patterns of "tenant/name": what they may see and use."""

    tenant: str
    rights: frozenset[str]
    adapters: tuple[str, ...]

    def sees(self, tenant: str, name: str) -> bool:
        return any(fnmatchcase(f"{tenant}/{name}", pattern) for pattern in self.adapters)


class Authenticator:
    """Maps call metadata to an identity."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def identify(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Identity:
        return Identity(tenant=DEFAULT_TENANT, rights=RIGHTS, adapters=(f"{DEFAULT_TENANT}/*",))
