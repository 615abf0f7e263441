"""Names near one that was not found, for a person who mistyped it.

They are looked for here, with a listing of what the caller may see. So a server says of a hidden name what it
says of a missing one, after the same work, and a failed request costs it nothing more.
"""

import argparse
from contextlib import closing
from difflib import get_close_matches
from itertools import islice

from lorafleet.client import Client
from lorafleet.commands import connection
from lorafleet.errors import AdapterNotFound, LoraFleetError

MOST = 3
# Versions of one listing. Of more only those around the name are looked at, so that a typo among 100,000
# adapters reads a few thousand.
PAGE = 1000
_TIMEOUT = 5.0


def near_of_command(error: LoraFleetError, args: argparse.Namespace) -> list[str]:
    """Does what `near` does, by a connection as the command's own."""
    if not isinstance(error, AdapterNotFound):
        return []
    try:
        with connection.connect(args, timeout=_TIMEOUT) as client:
            return near(error, client)
    except OSError:
        return []


def near(error: LoraFleetError, client: Client) -> list[str]:
    """Up to three refs like the one that was not found; none for another error, or when this fails, too."""
    ref = error.metadata.get("adapter", "") if isinstance(error, AdapterNotFound) else ""
    path, _, version = ref.partition("@")
    tenant, slash, name = path.rpartition("/")
    if not name:
        return []
    try:
        if aliases := [each.alias for each in client.adapters.aliases(name, tenant=tenant)]:
            return [f"{path}@{alias}" for alias in get_close_matches(version or "latest", aliases, MOST, 0.0)]
        return [tenant + slash + each for each in get_close_matches(name, _names(client, tenant, name), MOST)]
    except LoraFleetError:
        return []


def _names(client: Client, tenant: str, name: str) -> set[str]:
    """All of the tenant's, or those that begin a page, a page behind `name` but its end, and one behind half
    of it."""
    names: set[str] = set()
    for after in ("", name[:-1], name[: len(name) // 2]):
        with closing(client.adapters.summaries(tenant=tenant, after=after)) as summaries:
            page = [each.name for each in islice(summaries, PAGE)]
        names.update(page)
        if not after and len(page) < PAGE:
            break
    return names
