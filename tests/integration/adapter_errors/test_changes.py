"""Names that nobody has or that are paths, missing rights, changes that must not be: refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorafleet.v1 import adapters_pb2 as pb
from tests.support.adapters.broken import Files, ask_for, ours, push_failure
from tests.support.services.cluster import Pair
from tests.support.services.failures import Stubs, failure, push_parts

DIGEST = "sha256:" + "0" * 64
PATHS = [
    "../other",
    "/abs/elsewhere",
    "a/../../b",
    "a\\..\\b",
    "a%2fb",
    "a\0b",
    "",
    ".",
    "n" * 300,
    "space ",
    "../acme/theirs",
    "quiet@../../theirs",
    "quiet@sha256:../../x",
]


@pytest.mark.parametrize("name", PATHS)
def test_names_that_are_paths_are_refused_by_every_call(stubs: Stubs, name: str) -> None:
    """None of them reads, shows or deletes what lies elsewhere."""
    adapters, inference = stubs.adapters, stubs.inference
    calls: list[tuple[Any, Any]] = [
        (inference.Generate, ask_for(name)),
        (adapters.Get, pb.GetAdapterRequest(adapter=name)),
        (adapters.Pull, pb.PullRequest(adapter=name)),
        (adapters.Delete, pb.DeleteAdapterRequest(adapter=name, force=True)),
        (adapters.SetAlias, pb.SetAliasRequest(adapter=f"{name}@x", target=DIGEST)),
        (adapters.Drain, pb.DrainAdapterRequest(adapter=name)),
    ]
    for call, message in calls:
        found = failure(call, message, "ops")
        ours(found, "INVALID_ARGUMENT", "INVALID_REQUEST")


def test_unknown_versions_and_aliases_are_not_found(stubs: Stubs) -> None:
    adapters = stubs.adapters
    for name in ("nobody", "quiet@nobody", f"quiet@{DIGEST}", "nobody/quiet"):
        calls: list[tuple[Any, Any]] = [
            (adapters.Get, pb.GetAdapterRequest(adapter=name)),
            (adapters.Pull, pb.PullRequest(adapter=name)),
            (adapters.Delete, pb.DeleteAdapterRequest(adapter=name)),
            (adapters.Protect, pb.ProtectRequest(adapter=name)),
            (adapters.Unprotect, pb.UnprotectRequest(adapter=name)),
            (adapters.Verify, pb.VerifyRequest(adapter=name)),
            (adapters.Residency, pb.ResidencyRequest(adapter=name)),
        ]
        for call, message in calls:
            found = failure(call, message, "ops")
            ours(found, "NOT_FOUND", "ADAPTER_NOT_FOUND")
            assert name in found.message
    missing = failure(adapters.DeleteAlias, pb.DeleteAliasRequest(adapter="quiet@nobody"), "ops")
    ours(missing, "NOT_FOUND", "ADAPTER_NOT_FOUND")
    target = pb.SetAliasRequest(adapter="quiet@new", target=DIGEST)
    ours(failure(adapters.SetAlias, target, "ops"), "NOT_FOUND", "ADAPTER_NOT_FOUND")


def test_other_tenants_see_nothing_and_guests_change_nothing(stubs: Stubs, files: Files) -> None:
    adapters = stubs.adapters
    for token in ("acme", "guest"):
        found = [
            failure(adapters.Get, pb.GetAdapterRequest(adapter=name), token)
            for name in ("default/quiet", "default/quite")
        ]
        ours(found[0], "NOT_FOUND", "ADAPTER_NOT_FOUND")
        assert found[0].message.replace("quiet", "quite") == found[1].message
        push = failure(adapters.Push, push_parts("default/mine", files), token)
        ours(push, "NOT_FOUND", "ADAPTER_NOT_FOUND")
    changes: list[tuple[str, Any, Any]] = [
        ("push", adapters.Push, push_parts("acme/mine", files)),
        ("push", adapters.Pull, pb.PullRequest(adapter="theirs")),
        ("manage", adapters.Delete, pb.DeleteAdapterRequest(adapter="theirs")),
        ("manage", adapters.SetAlias, pb.SetAliasRequest(adapter="theirs@x", target="latest")),
        ("manage", adapters.DeleteAlias, pb.DeleteAliasRequest(adapter="theirs@latest")),
        ("manage", adapters.Protect, pb.ProtectRequest(adapter="theirs")),
        ("manage", adapters.Unprotect, pb.UnprotectRequest(adapter="theirs")),
        ("operate", adapters.Verify, pb.VerifyRequest(adapter="theirs")),
        ("manage", adapters.Residency, pb.ResidencyRequest()),
    ]
    for right, call, message in changes:
        denied = failure(call, message, "guest")
        ours(denied, "PERMISSION_DENIED", "PERMISSION_DENIED")
        assert denied.metadata == {"right": right}
    ours(failure(adapters.List, pb.ListAdaptersRequest()), "UNAUTHENTICATED", "UNAUTHENTICATED")
    ours(failure(adapters.Push, push_parts("a", files), "x"), "UNAUTHENTICATED", "UNAUTHENTICATED")


def test_what_is_in_use_is_not_deleted(stubs: Stubs, main: Pair, adapter: Callable[..., Path]) -> None:
    with main.client("ops") as client:
        old = client.adapters.push(adapter("held"), "held").version.digest
        found = failure(stubs.adapters.Delete, pb.DeleteAdapterRequest(adapter=f"held@{old}"), "ops")
        ours(found, "FAILED_PRECONDITION", "IN_USE")
        assert "latest" in found.message
        client.adapters.protect(f"held@{old}")
        client.adapters.delete_alias("held@latest")
        found = failure(stubs.adapters.Delete, pb.DeleteAdapterRequest(adapter=f"held@{old}"), "ops")
        ours(found, "FAILED_PRECONDITION", "IN_USE")
        assert "protect" in found.message
        client.adapters.unprotect(f"held@{old}")
        assert client.adapters.delete(f"held@{old}") == old


def test_a_moved_alias_aborts(stubs: Stubs, main: Pair, files: Files) -> None:
    found = push_failure(stubs, files, name="quiet", expected_generation=7)
    ours(found, "ABORTED", "GENERATION_MISMATCH")
    assert "generation" in found.message
    move = pb.SetAliasRequest(adapter="quiet@latest", target="latest", expected_generation=0)
    ours(failure(stubs.adapters.SetAlias, move, "ops"), "ABORTED", "GENERATION_MISMATCH")
