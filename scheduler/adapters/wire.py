"""Turns Adapters requests into checked names, and what the store says into messages."""

from collections.abc import Iterable

from adapter_store import (
    Alias,
    InvalidRef,
    Manifest,
    PushFacts,
    PushOptions,
    Ref,
    Summary,
    Version,
    VersionState,
)
from adapter_store.record import MAX_TARGETS, MAX_WEIGHT
from lorafleet.v1 import adapters_pb2
from scheduler.adapters.ingest import Push
from scheduler.admission.identity import MANAGE, PUSH, Identity
from scheduler.admission.lookup import parse_ref, require
from scheduler.errors import AdapterNotFound, InvalidRequest

LATEST = "latest"
STATES = {
    VersionState.ACTIVE: adapters_pb2.VERSION_STATE_ACTIVE,
    VersionState.DRAINING: adapters_pb2.VERSION_STATE_DRAINING,
    VersionState.DELETED: adapters_pb2.VERSION_STATE_DELETED,
}


def alias_message(alias: Alias) -> adapters_pb2.AdapterAlias:
    return adapters_pb2.AdapterAlias(
        tenant=alias.tenant,
        name=alias.name,
        alias=alias.alias,
        digest=alias.digest,
        generation=alias.generation,
        targets=[
            adapters_pb2.AliasTarget(target=digest, weight=weight) for digest, weight in alias.weights.items()
        ],
    )


def version_message(version: Version, aliases: Iterable[Alias]) -> adapters_pb2.AdapterVersion:
    """`aliases`: some that may point to the version, of any name."""
    names = (version.tenant, version.name)
    pointing = (
        alias.alias
        for alias in aliases
        if (alias.tenant, alias.name) == names and version.digest in (alias.weights or (alias.digest,))
    )
    message = summary_message(Summary.of(version, pointing))
    add_details(message, version.manifest, version.push)
    return message


def summary_message(summary: Summary) -> adapters_pb2.AdapterVersion:
    return adapters_pb2.AdapterVersion(
        tenant=summary.tenant,
        name=summary.name,
        digest=summary.digest,
        max_rank=summary.max_rank,
        num_bytes=summary.num_bytes,
        base_model=summary.base_model,
        created_at_ms=int(summary.created_at * 1000),
        protected=summary.protected,
        quarantined=summary.quarantined,
        state=STATES[summary.state],
        aliases=summary.aliases,
    )


def add_details(message: adapters_pb2.AdapterVersion, manifest: Manifest, push: PushFacts) -> None:
    """What a summary leaves out."""
    for module in manifest.modules:
        message.modules.add(name=module.name, rank=module.rank, scale=module.scale)
    message.full_heads.extend(head.name for head in manifest.full_heads)
    message.dtypes.extend(manifest.dtypes)
    message.has_chat_template = manifest.chat_template is not None
    message.end_token_ids.extend(manifest.text.end_token_ids)
    message.special_tokens.update(manifest.text.special_tokens)
    for warning in push.warnings:
        message.push_warnings.add(reason=warning.reason, message=warning.message)
        message.warnings.append(warning.message)


def alias_targets(request: adapters_pb2.SetAliasRequest) -> list[tuple[str, str, int]]:
    """(field, digest or alias, weight) of each target. Raises InvalidRequest."""
    if not request.targets:
        return [("target", request.target, 1)]
    if request.target:
        raise InvalidRequest("target", "is set beside targets")
    for number, target in enumerate(request.targets):
        if not 1 <= target.weight <= MAX_WEIGHT:
            raise InvalidRequest(f"targets[{number}].weight", f"{target.weight} is not in [1, {MAX_WEIGHT}]")
    if len(request.targets) > MAX_TARGETS:
        raise InvalidRequest("targets", f"has {len(request.targets)} entries; at most {MAX_TARGETS}")
    return [(f"targets[{n}].target", each.target, each.weight) for n, each in enumerate(request.targets)]


def push_target(header: adapters_pb2.PushHeader, identity: Identity) -> Push:
    """Where a push goes. Checks all that can be checked before the upload."""
    if "@" in header.adapter:
        raise InvalidRequest("header.adapter", "is [tenant/]name; the alias has its own field")
    ref = parse_ref(header.adapter, identity, "header.adapter")
    if not identity.sees(ref.tenant, ref.name):
        raise AdapterNotFound(header.adapter)
    require(identity, PUSH, "pushing an adapter")
    alias = (header.alias or None) if header.HasField("alias") else LATEST
    if alias is not None:
        _check_alias(ref, alias)
        if alias != LATEST:
            require(identity, MANAGE, "moving another alias than latest")
    generation = header.expected_generation if header.HasField("expected_generation") else None
    if alias is None and generation is not None:
        raise InvalidRequest("header.expected_generation", "is of an alias, and none is to be moved")
    options = PushOptions(
        alias,
        generation,
        strict=header.strict,
        strict_base=header.strict_base,
        dry_run=header.dry_run,
    )
    return Push(ref.tenant, ref.name, options)


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
