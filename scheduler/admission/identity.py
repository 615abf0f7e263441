"""Who a caller is: a tenant, what it may do (rights), and which adapters it sees (patterns)."""

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

INFER = "infer"  # Generate text with what the patterns show.
PUSH = "push"  # Bring versions, and take their files out again.
MANAGE = "manage"  # Aliases, deletion, protection, pins and drains of what the patterns show.
OPERATE = "operate"  # The fleet, verify, gc, and where the copies of all tenants are.
RIGHTS = frozenset({INFER, PUSH, MANAGE, OPERATE})
DEFAULT_TENANT = "default"
_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_WILDCARD = re.compile(r"[*?[]")


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller. `adapters` are glob patterns of "tenant/name": what they may see.

    `kind` (everyone, token, jwt, certificate) and `subject`, which names one among its kind and is no
    secret, are for the log only: callers who differ in nothing else are equal.
    """

    tenant: str
    rights: frozenset[str]
    adapters: tuple[str, ...]
    kind: str = field(default="token", compare=False)
    subject: str = field(default="", compare=False)

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


EVERYONE = Identity(DEFAULT_TENANT, RIGHTS, ("*/*",), kind="everyone")


def checked_identity(
    tenant: object, rights: object, adapters: object, *, kind: str = "token", subject: str = ""
) -> Identity:
    """An identity of what a file or a token says; `adapters` None is all of the tenant's own.

    Raises ValueError, whose text begins with the field: tenant, rights or adapters.
    """
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise ValueError(f"tenant: {tenant!r} is not a tenant's name")
    granted = _strings(rights, "rights")
    if not set(granted) <= RIGHTS:
        raise ValueError(f"rights: knows only {', '.join(sorted(RIGHTS))}")
    patterns = (f"{tenant}/*",) if adapters is None else _strings(adapters, "adapters")
    if any(pattern.count("/") != 1 for pattern in patterns):
        raise ValueError('adapters: patterns are of the form "tenant/name"')
    return Identity(tenant, frozenset(granted), patterns, kind, subject)


def _strings(value: object, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{name}: needs a list of strings")
    return tuple(value)
