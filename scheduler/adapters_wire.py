"""The Adapters service's messages: requests to checked names, what the store says to messages."""

from collections.abc import Iterable

from adapter_store import Alias, InvalidRef, Ref, Version
from lorafleet.v1 import adapters_pb2
from scheduler.auth import ADMIN, Identity
from scheduler.errors import AdapterNotFound, InvalidRequest
from scheduler.ingest import Push
from scheduler.lookup import parse_ref, require


def alias_message(alias: Alias) -> adapters_pb2.AdapterAlias:
    return adapters_pb2.AdapterAlias(
        tenant=alias.tenant,
        name=alias.name,
        alias=alias.alias,
        digest=alias.digest,
        generation=alias.generation,
    )


def version_message(version: Version, aliases: Iterable[Alias]) -> adapters_pb2.AdapterVersion:
    """`aliases`: some that may point to the version, of any name."""
    manifest = version.manifest
    return adapters_pb2.AdapterVersion(
        tenant=version.tenant,
        name=version.name,
        digest=version.digest,
        modules=[
            adapters_pb2.AdapterModule(name=module.name, rank=module.rank, scale=module.scale)
            for module in manifest.modules
        ],
        max_rank=manifest.max_rank,
        dtypes=manifest.dtypes,
        num_bytes=manifest.num_bytes,
        base_model=manifest.base_model,
        has_chat_template=manifest.chat_template is not None,
        created_at_ms=int(version.created_at * 1000),
        protected=version.protected,
        warnings=manifest.warnings,
        aliases=[
            alias.alias
            for alias in aliases
            if (alias.name, alias.digest) == (version.name, version.digest) and alias.tenant == version.tenant
        ],
    )


def push_target(header: adapters_pb2.PushHeader, identity: Identity) -> Push:
    """Where a push goes. Checks all that can be checked before the upload."""
    if "@" in header.adapter:
        raise InvalidRequest("header.adapter", "is [tenant/]name; the alias has its own field")
    ref = parse_ref(header.adapter, identity, "header.adapter")
    if not identity.sees(ref.tenant, ref.name):
        raise AdapterNotFound(header.adapter)
    require(identity, ADMIN, "pushing an adapter")
    alias = (header.alias or None) if header.HasField("alias") else "latest"
    if alias is not None:
        _check_alias(ref, alias)
    generation = header.expected_generation if header.HasField("expected_generation") else None
    if alias is None and generation is not None:
        raise InvalidRequest("header.expected_generation", "is of an alias, and none is to be moved")
    return Push(ref.tenant, ref.name, alias, header.strict_base, header.dry_run, generation)


def _check_alias(ref: Ref, alias: str) -> None:
    try:
        Ref(ref.tenant, ref.name, alias=alias)
    except InvalidRef as error:
        raise InvalidRequest("header.alias", str(error)) from error


def alias_ref(text: str, identity: Identity) -> tuple[Ref, str]:
    """The parsed ref, whose alias must be written out."""
    ref = parse_ref(text, identity)
    if "@" not in text or ref.alias is None:
        raise InvalidRequest("adapter", "must be [tenant/]name@alias")
    return ref, ref.alias


def listing_names(tenant: str, name: str, identity: Identity) -> tuple[str, str | None]:
    """Tenant and name of a listing, checked before they reach the store."""
    tenant = tenant or identity.tenant
    try:
        Ref(tenant, name or "any", alias="any")
    except InvalidRef as error:
        raise InvalidRequest("tenant" if "tenant" in str(error) else "name", str(error)) from error
    return tenant, name or None
