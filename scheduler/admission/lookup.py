"""Finds the version behind a ref, as far as its caller may see it. Blocking: runs in a thread pool."""

import dataclasses
import secrets
from collections.abc import Callable
from typing import TypeVar

import adapter_store
from adapter_store import InvalidRef, ModelSpec, Ref, Version, is_expert, place_of
from scheduler.admission.identity import Identity
from scheduler.errors import AdapterNotFound, IncompatibleAdapter, InvalidRequest, PermissionDenied

T = TypeVar("T", Version, Version | None)


def parse_ref(text: str, identity: Identity, field: str = "adapter") -> Ref:
    """Raises InvalidRequest. Refs are exact: nothing is trimmed or folded to lower case."""
    try:
        return Ref.parse(text, identity.tenant)
    except InvalidRef as error:
        raise InvalidRequest(field, str(error)) from error


def find_version(find: Callable[[Ref], T], ref: Ref, identity: Identity, text: str) -> T:
    """The version behind `ref`, as `find` says. Raises AdapterNotFound with `text`, the ref as the caller
    wrote it.

    What the caller may not see is looked up too, under a tenant that cannot exist: the same text after the
    same work, so neither tells that it is there.
    """
    if not identity.sees(ref.tenant, ref.name):
        ref = dataclasses.replace(ref, tenant=f"hidden-{secrets.token_hex(16)}")
    try:
        return find(ref)
    except adapter_store.AdapterNotFound:
        raise AdapterNotFound(text) from None


def require(identity: Identity, right: str, what: str) -> None:
    """Call it after the caller was found to see what it is about. Raises PermissionDenied."""
    if right not in identity.rights:
        raise PermissionDenied(f"{what} needs the right {right!r}", metadata={"right": right})


def check_fits(version: Version, spec: ModelSpec) -> None:
    """That every module of the version is one of this base model. Raises IncompatibleAdapter naming it."""
    for module in version.manifest.modules:
        shape = spec.modules.get(place_of(module.name))
        experts = spec.moe.num_experts if spec.moe and is_expert(module.name) else 0
        fits = shape == (module.in_features, module.out_features) and module.num_experts == experts
        if not fits or not spec.has_place_for(module.name):
            raise IncompatibleAdapter(
                f"{version.tenant}/{version.name} was made for another base model: {module.name} maps "
                f"{module.in_features} to {module.out_features}, which {spec.name} has no place for",
                metadata={"digest": version.digest, "module": module.name},
            )
    for head in version.manifest.full_heads:
        if head.shape != (spec.vocab_size, spec.hidden_size):
            raise IncompatibleAdapter(
                f"{version.tenant}/{version.name} was made for another base model: its {head.name} is "
                f"{list(head.shape)}, that of {spec.name} {[spec.vocab_size, spec.hidden_size]}",
                metadata={"digest": version.digest, "module": head.name},
            )
