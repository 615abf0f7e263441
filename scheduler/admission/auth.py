"""Who a caller is, by the token file, and what it may see and do.

The token file is TOML; it holds hashes only, and is read again when it changes:

    [[tokens]]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"  # of the token itself
    tenant = "acme"
    rights = ["infer", "admin"]
    adapters = ["acme/*", "shared/legal-*"]  # what the caller sees; the default is all of the tenant's own

"infer" allows generation with what the patterns show, "admin" to change it.
"""

import hashlib
import hmac
import logging
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import grpc

from scheduler.errors import Unauthenticated

logger = logging.getLogger(__name__)

INFER = "infer"
ADMIN = "admin"
RIGHTS = frozenset({INFER, ADMIN})
DEFAULT_TENANT = "default"
_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_WILDCARD = re.compile(r"[*?[]")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEYS = frozenset({"sha256", "tenant", "rights", "adapters"})


class InvalidTokenFile(Exception):
    """The file cannot be used; the text names the entry and the key."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller. `adapters` are glob patterns of "tenant/name": what they may see."""

    tenant: str
    rights: frozenset[str]
    adapters: tuple[str, ...]

    @property
    def sees_everything(self) -> bool:
        return "*/*" in self.adapters

    def sees(self, tenant: str, name: str) -> bool:
        """Tenant and name are matched apart, so that "*" never crosses the slash."""
        for pattern in self.adapters:
            tenant_pattern, _, name_pattern = pattern.partition("/")
            if fnmatchcase(tenant, tenant_pattern) and fnmatchcase(name, name_pattern):
                return True
        return False

    def name_prefixes(self, tenant: str) -> tuple[str, ...]:
        """What the names that they may see in this tenant begin with: sorted, none the beginning of another.
        "" is any name; none at all when they see nothing there."""
        patterns = (pattern.partition("/") for pattern in self.adapters)
        found = {_WILDCARD.split(name, 1)[0] for where, _, name in patterns if fnmatchcase(tenant, where)}
        return tuple(sorted(each for each in found if not any(each[:n] in found for n in range(len(each)))))


EVERYONE = Identity(tenant=DEFAULT_TENANT, rights=RIGHTS, adapters=("*/*",))


class Authenticator:
    """Maps call metadata to an identity. Without a token file every caller is EVERYONE."""

    def __init__(self, token_file: Path | None = None) -> None:
        """Raises InvalidTokenFile."""
        self._file = token_file
        self._stamp: tuple[int, int, int] | None = None
        self._identities: tuple[tuple[str, Identity], ...] = ()
        if token_file is not None:
            self._stamp = _stamp(token_file)
            self._identities = _load(token_file)

    def caller(self, context: grpc.aio.ServicerContext) -> Identity:
        """Who makes a call. Raises Unauthenticated."""
        return self.identify(context.invocation_metadata())

    def identify(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Identity:
        """Raises Unauthenticated, with one text for every wrong token."""
        if self._file is None:
            return EVERYONE
        self._reload(self._file)
        hashed = hashlib.sha256(_bearer_token(metadata).encode()).hexdigest()
        found: Identity | None = None
        # All entries, whichever matches: the time tells nothing about where.
        for known, identity in self._identities:
            if hmac.compare_digest(known, hashed):
                found = identity
        if found is None:
            raise Unauthenticated("the bearer token is not known here")
        return found

    def _reload(self, file: Path) -> None:
        """A file that became unreadable changes nothing, and says so in the log once."""
        stamp = _stamp(file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._identities = _load(file)
            logger.info("read %d tokens from %s", len(self._identities), file)
        except InvalidTokenFile as error:
            logger.error("keeping the tokens read before: %s", error)


def _bearer_token(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    values = [value for key, value in metadata or () if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        raise Unauthenticated('send "authorization: Bearer <token>" once in the call\'s metadata')
    scheme, _, token = values[0].partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated('the authorization must be of the form "Bearer <token>"')
    return token.strip()


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Changes when the file does, also when another one is renamed over it."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _load(file: Path) -> tuple[tuple[str, Identity], ...]:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidTokenFile(f"{file}: {error}") from error
    entries = content.get("tokens")
    if set(content) != {"tokens"} or not isinstance(entries, list):
        raise InvalidTokenFile(f"{file}: needs [[tokens]] and nothing else")
    return tuple(_entry(entry, f"{file}: tokens[{index}]") for index, entry in enumerate(entries))


def _entry(entry: Mapping[str, Any], where: str) -> tuple[str, Identity]:
    if not isinstance(entry, Mapping) or not {"sha256", "tenant", "rights"} <= set(entry) <= _KEYS:
        raise InvalidTokenFile(f"{where}: needs sha256, tenant, rights, may have adapters, and nothing else")
    hashed, tenant = str(entry["sha256"]), str(entry["tenant"])
    if not _SHA256.fullmatch(hashed):
        raise InvalidTokenFile(f"{where}.sha256: needs 64 lowercase hex digits")
    if not _TENANT.fullmatch(tenant):
        raise InvalidTokenFile(f"{where}.tenant: {tenant!r} is not a tenant's name")
    rights = _strings(entry["rights"], f"{where}.rights")
    if not set(rights) <= RIGHTS:
        raise InvalidTokenFile(f"{where}.rights: knows only {sorted(RIGHTS)}")
    patterns = _strings(entry.get("adapters", [f"{tenant}/*"]), f"{where}.adapters")
    if any(pattern.count("/") != 1 for pattern in patterns):
        raise InvalidTokenFile(f'{where}.adapters: patterns are of the form "tenant/name"')
    return hashed, Identity(tenant, frozenset(rights), patterns)


def _strings(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidTokenFile(f"{where}: needs a list of strings")
    return tuple(value)
