"""The file of tokens and certificates: TOML that holds hashes and names only.

[[tokens]]
sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"  # of the token itself
tenant = "acme"
rights = ["infer", "push", "manage"]
adapters = ["acme/*", "shared/legal-*"]  # what the caller sees; the default is all of the tenant's own

[[certificates]]
san = "spiffe://example.org/ns/prod/sa/web"  # or a DNS name
tenant = "acme"
rights = ["infer"]
"""

import logging
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.admission.identity import MANAGE, PUSH, Identity, checked_identity
from scheduler.watched_file import InvalidFile

logger = logging.getLogger(__name__)

FORMER_ADMIN = "admin"  # Older files have it; it was allowed to operate the fleet, too.
_ENTRY = frozenset({"tenant", "rights"})
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_SAN = re.compile(rf"[a-z][a-z0-9+.-]*://[!-~]+|{_LABEL}(\.{_LABEL})*")
SUBJECT_DIGITS = 12  # Of a hash: they name an entry of the file, and are no way back to the token.


@dataclass(frozen=True, slots=True)
class Known:
    """Identities by the hash of a token in hex, and by a name in a certificate."""

    tokens: Mapping[str, Identity]
    certificates: Mapping[str, Identity]


def load(file: Path) -> Known:
    """Raises InvalidFile."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidFile(f"{file}: {error}") from error
    if not content or not content.keys() <= {"tokens", "certificates"}:
        raise InvalidFile(f"{file}: needs [[tokens]] or [[certificates]], and nothing else")
    return Known(
        tokens=_table(content.get("tokens", []), "sha256", _SHA256, f"{file}: tokens"),
        certificates=_table(content.get("certificates", []), "san", _SAN, f"{file}: certificates"),
    )


def _table(entries: object, key: str, form: re.Pattern[str], where: str) -> dict[str, Identity]:
    if not isinstance(entries, list):
        raise InvalidFile(f"{where}: needs entries of the form [[{where.rpartition(' ')[2]}]]")
    found: dict[str, Identity] = {}
    for index, entry in enumerate(entries):
        at = f"{where}[{index}]"
        if not isinstance(entry, Mapping) or not {key, *_ENTRY} <= entry.keys() <= {key, *_ENTRY, "adapters"}:
            raise InvalidFile(f"{at}: needs {key}, tenant, rights, may have adapters, and nothing else")
        name = str(entry[key])
        if not form.fullmatch(name):
            needs = "64 lowercase hex digits" if key == "sha256" else "a URI, or a DNS name in lowercase"
            raise InvalidFile(f"{at}.{key}: needs {needs}")
        if name in found:
            raise InvalidFile(f"{at}.{key}: is the same as that of entry {list(found).index(name)}")
        found[name] = _identity(entry, key, name, at)
    return found


def _identity(entry: Mapping[str, Any], key: str, name: str, at: str) -> Identity:
    rights = entry["rights"]
    if isinstance(rights, list) and FORMER_ADMIN in rights and key == "sha256":
        rights = [each for each in rights if each not in (FORMER_ADMIN, PUSH, MANAGE)] + [PUSH, MANAGE]
        logger.warning(
            '%s: the right "admin" is read as push and manage; write rights = %s in its place, and "operate" '
            "besides where the caller operates the fleet, verifies or collects",
            at,
            str(rights).replace("'", '"'),
        )
    kind, subject = ("token", name[:SUBJECT_DIGITS]) if key == "sha256" else ("certificate", name)
    try:
        return checked_identity(entry["tenant"], rights, entry.get("adapters"), kind=kind, subject=subject)
    except ValueError as error:
        raise InvalidFile(f"{at}.{error}") from None
