"""References: how people name a version, `[tenant/]name[@alias | @sha256:<64 hex>]`."""

import re
from dataclasses import dataclass

from adapter_store.errors import InvalidRef

_IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def check_identifier(part: str, text: str) -> str:
    """`text` itself when it may serve as a tenant, name or alias; InvalidRef naming `part` if not.

    Identifiers become file names: the pattern admits no separator and no leading dot. "latest." or
    "a..b" are harmless single names.
    """
    if not _IDENTIFIER.fullmatch(text):
        raise InvalidRef(f"{part} {_shown(text)} is not of the form [a-z0-9][a-z0-9._-]{{0,62}}")
    return text


def check_digest(text: str) -> str:
    if not _DIGEST.fullmatch(text):
        raise InvalidRef(f"digest {_shown(text)} is not of the form sha256:<64 lowercase hex digits>")
    return text


@dataclass(frozen=True, slots=True)
class Ref:
    """One version of one tenant's adapter: exactly one of alias and digest is set."""

    tenant: str
    name: str
    alias: str | None = None
    digest: str | None = None

    def __post_init__(self) -> None:
        check_identifier("tenant", self.tenant)
        check_identifier("name", self.name)
        if (self.alias is None) == (self.digest is None):
            raise InvalidRef("a ref needs an alias or a digest, and not both")
        if self.alias is not None:
            check_identifier("alias", self.alias)
        if self.digest is not None:
            check_digest(self.digest)

    @classmethod
    def parse(cls, text: str, default_tenant: str) -> "Ref":
        """Raises InvalidRef, naming the part that is wrong. The alias is `latest` when none is given."""
        path, at, version = text.partition("@")
        tenant, slash, name = path.rpartition("/")
        tenant = tenant if slash else default_tenant
        if not at:
            return cls(tenant, name, alias="latest")
        if version.startswith("sha256:"):
            return cls(tenant, name, digest=version)
        return cls(tenant, name, alias=version)

    def __str__(self) -> str:
        return f"{self.tenant}/{self.name}@{self.alias or self.digest}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...")
