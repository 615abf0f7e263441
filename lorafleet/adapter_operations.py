"""The calls of the Adapters service as data, as in lorafleet/operations.py."""

from collections.abc import Mapping, Sequence

import grpc

from lorafleet import results, wire
from lorafleet.errors import LoraFleetError, invalid
from lorafleet.operations import PAGE_SIZE, Operation, Page
from lorafleet.transfer import ADAPTER_FILES
from lorafleet.v1 import adapters_pb2 as pb

_TIERS = {"host": pb.RESIDENCY_TIER_HOST, "slot": pb.RESIDENCY_TIER_SLOT}


def push(
    name: str, alias: str, strict: bool, strict_base: bool, dry_run: bool, expected_generation: int | None
) -> Operation[results.PushResult]:
    """An upload whose first message carries `request`; lorafleet/transfer.py makes the messages."""
    header = pb.PushHeader(
        adapter=name,
        alias=alias,
        strict=strict,
        strict_base=strict_base,
        dry_run=dry_run,
        expected_generation=expected_generation,
        looked_for=ADAPTER_FILES,
    )
    return Operation(
        "Adapters/Push", pb.PushRequest(header=header), _strict_result if strict else wire.push_result
    )


def _strict_result(message: pb.PushResponse) -> results.PushResult:
    result = wire.push_result(message)
    if result.version.warnings:
        told = "; ".join(map(str, result.version.warnings))
        raise LoraFleetError(
            grpc.StatusCode.UNIMPLEMENTED,
            f"this scheduler is too old for strict pushes, and took the adapter with warnings: {told}",
        )
    return result


def pull(ref: str) -> Operation[pb.PullResponse]:
    """A stream of file pieces; lorafleet/transfer.py writes them."""
    return Operation("Adapters/Pull", pb.PullRequest(adapter=ref), lambda message: message)


def get_adapter(ref: str) -> Operation[results.AdapterVersion]:
    return Operation(
        "Adapters/Get", pb.GetAdapterRequest(adapter=ref), lambda response: wire.version(response.version)
    )


def list_adapters(name: str, tenant: str, page_token: str) -> Operation[Page[results.AdapterVersion]]:
    return Operation(
        "Adapters/List",
        pb.ListAdaptersRequest(name=name, tenant=tenant, page_size=PAGE_SIZE, page_token=page_token),
        lambda response: Page(tuple(map(wire.version, response.versions)), response.next_page_token),
    )


def list_summaries(
    name: str, tenant: str, deleted: bool, after: str, page_token: str
) -> Operation[Page[results.AdapterSummary]]:
    """`after`: where the first page begins; the token of a page is "name@digest" of the last item."""
    return Operation(
        "Adapters/List",
        pb.ListAdaptersRequest(
            name=name,
            tenant=tenant,
            page_size=PAGE_SIZE,
            page_token=page_token or after,
            summary=True,
            deleted=deleted,
        ),
        lambda response: Page(tuple(map(wire.summary, response.versions)), response.next_page_token),
    )


def delete_adapter(ref: str, force: bool, now: bool) -> Operation[str]:
    return Operation(
        "Adapters/Delete",
        pb.DeleteAdapterRequest(adapter=ref, force=force, now=now),
        lambda response: str(response.digest),
    )


def set_alias(
    ref: str, target: str | Mapping[str, int], expected_generation: int | None
) -> Operation[results.AdapterAlias]:
    request = pb.SetAliasRequest(adapter=ref, expected_generation=expected_generation)
    if isinstance(target, str):
        request.target = target
    else:
        for each, weight in target.items():
            request.targets.add(target=each, weight=weight)
    return Operation("Adapters/SetAlias", request, lambda response: wire.alias(response.alias))


def delete_alias(ref: str) -> Operation[None]:
    return Operation("Adapters/DeleteAlias", pb.DeleteAliasRequest(adapter=ref), lambda response: None)


def list_aliases(name: str, tenant: str) -> Operation[tuple[results.AdapterAlias, ...]]:
    return Operation(
        "Adapters/ListAliases",
        pb.ListAliasesRequest(name=name, tenant=tenant),
        lambda response: tuple(map(wire.alias, response.aliases)),
    )


def protect(ref: str) -> Operation[results.AdapterVersion]:
    return Operation(
        "Adapters/Protect", pb.ProtectRequest(adapter=ref), lambda response: wire.version(response.version)
    )


def unprotect(ref: str) -> Operation[results.AdapterVersion]:
    return Operation(
        "Adapters/Unprotect",
        pb.UnprotectRequest(adapter=ref),
        lambda response: wire.version(response.version),
    )


def verify(ref: str) -> Operation[results.Verification]:
    return Operation("Adapters/Verify", pb.VerifyRequest(adapter=ref), wire.verification)


def residency(ref: str) -> Operation[tuple[results.Residency, ...]]:
    return Operation(
        "Adapters/Residency",
        pb.ResidencyRequest(adapter=ref),
        lambda response: tuple(map(wire.residency, response.copies)),
    )


def pin(ref: str, tier: str, executors: Sequence[str]) -> Operation[results.Pinned]:
    """Raises InvalidRequest for another tier than "host" and "slot"."""
    if tier not in _TIERS:
        raise invalid("tier", f"{tier!r} is neither 'host' nor 'slot'")
    return Operation(
        "Adapters/Pin", pb.PinRequest(adapter=ref, tier=_TIERS[tier], executors=executors), wire.pinned
    )


def unpin(ref: str, executors: Sequence[str]) -> Operation[str]:
    return Operation(
        "Adapters/Unpin",
        pb.UnpinRequest(adapter=ref, executors=executors),
        lambda response: str(response.digest),
    )


def drop(ref: str, executors: Sequence[str]) -> Operation[results.Freed]:
    return Operation(
        "Adapters/Drop",
        pb.DropCopiesRequest(adapter=ref, executors=executors),
        lambda response: results.Freed(response.digest, tuple(response.remaining)),
    )


def drain(ref: str) -> Operation[results.Freed]:
    return Operation(
        "Adapters/Drain",
        pb.DrainAdapterRequest(adapter=ref),
        lambda response: results.Freed(response.digest, tuple(response.unreachable)),
    )


def activate(ref: str) -> Operation[results.AdapterVersion]:
    return Operation(
        "Adapters/Activate", pb.ActivateRequest(adapter=ref), lambda response: wire.version(response.version)
    )


def delete_damaged(name: str, dry_run: bool) -> Operation[results.Collection]:
    return Operation(
        "Adapters/DeleteDamaged",
        pb.DeleteDamagedRequest(adapter=name, dry_run=dry_run),
        lambda response: results.Collection(
            tuple(f"{response.adapter}@{digest}" for digest in response.digests), response.num_bytes
        ),
    )


def collect(dry_run: bool) -> Operation[results.Collection]:
    return Operation("Adapters/Collect", pb.CollectRequest(dry_run=dry_run), wire.collection)
