"""Whether a namespace of keys is a store, and of which format: one key says so."""

from adapter_store.formats import FORMAT, no_store, other_format
from adapter_store.redis_store.keys import Keys
from adapter_store.redis_store.primary import Primary


def claim_namespace(primary: Primary, keys: Keys, where: str, *, create: bool) -> None:
    """Makes a store of the namespace if need be. Raises NoStore unless it may, OtherFormat."""
    looked_at = (("GET", keys.format), ("EXISTS", keys.changes), ("EXISTS", keys.first_change))
    stated, has_changes, has_first = primary.run(*looked_at)
    where = f"{where}, namespace {keys.namespace}"
    # Before stores stated it: the first format counted changes, and did not say from where on.
    found = int(stated) if stated else (2 if has_first else 1) if has_changes else None
    if found is None and not create:
        raise no_store(where)
    if found is not None and found != FORMAT:
        raise other_format(where, found)
    if not stated:
        primary.run(("SET", keys.format, FORMAT), durable=True)
