"""The calls of the Adapters service as data, as in lorafleet/operations.py."""

from collections.abc import Mapping, Sequence

import grpc

from lorafleet import results, wire
from lorafleet.errors import LoraFleetError, invalid
from lorafleet.operations import PAGE_SIZE, Operation, Page
from lorafleet.transfer import ADAPTER_FILES
from lorafleet.v1 import adapters_pb2

_TIERS = {"host": adapters_pb2.RESIDENCY_TIER_HOST, "slot": adapters_pb2.RESIDENCY_TIER_SLOT}


def push(
    name: str, alias: str, strict: bool, strict_base: bool, dry_run: bool, expected_generation: int | None
) -> Operation[results.PushResult]:
    """An upload whose first message carries `request`; lorafleet/transfer.py makes the messages."""
    header = adapters_pb2.PushHeader(
        adapter=name,
        alias=alias,
        strict=strict,
        strict_base=strict_base,
        dry_run=dry_run,
        expected_generation=expected_generation,
        looked_for=ADAPTER_FILES,
    )
    return Operation(
        "/lorafleet.v1.Adapters/Push",
        adapters_pb2.PushRequest(header=header),
        adapters_pb2.PushResponse,
        _strict_result if strict else wire.push_result,
    )


def _strict_result(message: adapters_pb2.PushResponse) -> results.PushResult:
    result = wire.push_result(message)
    if result.version.warnings:
        told = "; ".join(map(str, result.version.warnings))
        raise LoraFleetError(
            grpc.StatusCode.UNIMPLEMENTED,
            f"this scheduler is too old for strict pushes, and took the adapter with warnings: {told}",
        )
    return result


def pull(ref: str) -> Operation[adapters_pb2.PullResponse]:
    """A stream of file pieces; lorafleet/transfer.py writes them."""
    return Operation(
        "/lorafleet.v1.Adapters/Pull",
        adapters_pb2.PullRequest(adapter=ref),
        adapters_pb2.PullResponse,
        lambda message: message,
    )


def get_adapter(ref: str) -> Operation[results.AdapterVersion]:
    return Operation(
        "/lorafleet.v1.Adapters/Get",
        adapters_pb2.GetAdapterRequest(adapter=ref),
        adapters_pb2.GetAdapterResponse,
        lambda response: wire.version(response.version),
    )


def list_adapters(name: str, tenant: str, page_token: str) -> Operation[Page[results.AdapterVersion]]:
    return Operation(
        "/lorafleet.v1.Adapters/List",
        adapters_pb2.ListAdaptersRequest(
            name=name, tenant=tenant, page_size=PAGE_SIZE, page_token=page_token
        ),
        adapters_pb2.ListAdaptersResponse,
        lambda response: Page(tuple(map(wire.version, response.versions)), response.next_page_token),
    )


def list_summaries(
    name: str, tenant: str, deleted: bool, after: str, page_token: str
) -> Operation[Page[results.AdapterSummary]]:
    """`after`: where the first page begins; the token of a page is "name@digest" of the last item."""
    return Operation(
        "/lorafleet.v1.Adapters/List",
        adapters_pb2.ListAdaptersRequest(
            name=name,
            tenant=tenant,
            page_size=PAGE_SIZE,
            page_token=page_token or after,
            summary=True,
            deleted=deleted,
        ),
        adapters_pb2.ListAdaptersResponse,
        lambda response: Page(tuple(map(wire.summary, response.versions)), response.next_page_token),
    )


def delete_adapter(ref: str, force: bool, now: bool) -> Operation[str]:
    return Operation(
        "/lorafleet.v1.Adapters/Delete",
        adapters_pb2.DeleteAdapterRequest(adapter=ref, force=force, now=now),
        adapters_pb2.DeleteAdapterResponse,
        lambda response: str(response.digest),
    )


def set_alias(
    ref: str, target: str | Mapping[str, int], expected_generation: int | None
) -> Operation[results.AdapterAlias]:
    request = adapters_pb2.SetAliasRequest(adapter=ref, expected_generation=expected_generation)
    if isinstance(target, str):
        request.target = target
    else:
        for each, weight in target.items():
            request.targets.add(target=each, weight=weight)
    return Operation(
        "/lorafleet.v1.Adapters/SetAlias",
        request,
        adapters_pb2.SetAliasResponse,
        lambda response: wire.alias(response.alias),
    )


def delete_alias(ref: str) -> Operation[None]:
    return Operation(
        "/lorafleet.v1.Adapters/DeleteAlias",
        adapters_pb2.DeleteAliasRequest(adapter=ref),
        adapters_pb2.DeleteAliasResponse,
        lambda response: None,
    )


def list_aliases(name: str, tenant: str) -> Operation[tuple[results.AdapterAlias, ...]]:
    return Operation(
        "/lorafleet.v1.Adapters/ListAliases",
        adapters_pb2.ListAliasesRequest(name=name, tenant=tenant),
        adapters_pb2.ListAliasesResponse,
        lambda response: tuple(map(wire.alias, response.aliases)),
    )


def protect(ref: str) -> Operation[results.AdapterVersion]:
    return Operation(
        "/lorafleet.v1.Adapters/Protect",
        adapters_pb2.ProtectRequest(adapter=ref),
        adapters_pb2.ProtectResponse,
        lambda response: wire.version(response.version),
    )


def unprotect(ref: str) -> Operation[results.AdapterVersion]:
    return Operation(
        "/lorafleet.v1.Adapters/Unprotect",
        adapters_pb2.UnprotectRequest(adapter=ref),
        adapters_pb2.UnprotectResponse,
        lambda response: wire.version(response.version),
    )


def verify(ref: str) -> Operation[results.Verification]:
    return Operation(
        "/lorafleet.v1.Adapters/Verify",
        adapters_pb2.VerifyRequest(adapter=ref),
        adapters_pb2.VerifyResponse,
        wire.verification,
    )


def residency(ref: str) -> Operation[tuple[results.Residency, ...]]:
    return Operation(
        "/lorafleet.v1.Adapters/Residency",
        adapters_pb2.ResidencyRequest(adapter=ref),
        adapters_pb2.ResidencyResponse,
        lambda response: tuple(map(wire.residency, response.copies)),
    )


def pin(ref: str, tier: str, executors: Sequence[str]) -> Operation[results.Pinned]:
    """Raises InvalidRequest for another tier than "host" and "slot"."""
    if tier not in _TIERS:
        raise invalid("tier", f"{tier!r} is neither 'host' nor 'slot'")
    return Operation(
        "/lorafleet.v1.Adapters/Pin",
        adapters_pb2.PinRequest(adapter=ref, tier=_TIERS[tier], executors=executors),
        adapters_pb2.PinResponse,
        wire.pinned,
    )


def unpin(ref: str, executors: Sequence[str]) -> Operation[str]:
    return Operation(
        "/lorafleet.v1.Adapters/Unpin",
        adapters_pb2.UnpinRequest(adapter=ref, executors=executors),
        adapters_pb2.UnpinResponse,
        lambda response: str(response.digest),
    )


def drop(ref: str, executors: Sequence[str]) -> Operation[results.Freed]:
    return Operation(
        "/lorafleet.v1.Adapters/Drop",
        adapters_pb2.DropCopiesRequest(adapter=ref, executors=executors),
        adapters_pb2.DropCopiesResponse,
        lambda response: results.Freed(response.digest, tuple(response.remaining)),
    )


def drain(ref: str) -> Operation[results.Freed]:
    return Operation(
        "/lorafleet.v1.Adapters/Drain",
        adapters_pb2.DrainAdapterRequest(adapter=ref),
        adapters_pb2.DrainAdapterResponse,
        lambda response: results.Freed(response.digest, tuple(response.unreachable)),
    )


def activate(ref: str) -> Operation[results.AdapterVersion]:
    return Operation(
        "/lorafleet.v1.Adapters/Activate",
        adapters_pb2.ActivateRequest(adapter=ref),
        adapters_pb2.ActivateResponse,
        lambda response: wire.version(response.version),
    )


def delete_damaged(name: str, dry_run: bool) -> Operation[results.Collection]:
    return Operation(
        "/lorafleet.v1.Adapters/DeleteDamaged",
        adapters_pb2.DeleteDamagedRequest(adapter=name, dry_run=dry_run),
        adapters_pb2.DeleteDamagedResponse,
        lambda response: results.Collection(
            tuple(f"{response.adapter}@{digest}" for digest in response.digests), response.num_bytes
        ),
    )


def collect(dry_run: bool) -> Operation[results.Collection]:
    return Operation(
        "/lorafleet.v1.Adapters/Collect",
        adapters_pb2.CollectRequest(dry_run=dry_run),
        adapters_pb2.CollectResponse,
        wire.collection,
    )
