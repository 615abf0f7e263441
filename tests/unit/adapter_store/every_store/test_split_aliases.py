"""Aliases that split their traffic by weight."""

import pytest

from adapter_store import (
    AdapterNotFound,
    AdapterStore,
    GenerationMismatch,
    InUse,
    InvalidRef,
    Ref,
    Version,
    VersionState,
)
from tests.support.stores.media import Medium, at

PROD = Ref.parse("acme/x@prod", "")
KEYS = [f"session-{number}" for number in range(400)]


def served(store: AdapterStore, key: str) -> str:
    return store.resolve(PROD, key).digest


def test_a_split_alias_gives_each_key_one_version(
    store: AdapterStore, versions: list[Version], medium: Medium
) -> None:
    a, b, _ = (version.digest for version in versions)
    alias = store.split_alias("acme", "x", "prod", {a: 90, b: 10})
    assert (alias.digest, alias.weights, alias.generation) == (a, {a: 90, b: 10}, 1)
    assert store.split_alias("acme", "x", "prod", {b: 10, a: 90}).generation == 1
    assert [each.weights for each in store.aliases("acme", "x")] == [{}, {a: 90, b: 10}]
    choice = {key: served(store, key) for key in KEYS}
    assert set(choice.values()) == {a, b}
    assert sum(digest == b for digest in choice.values()) < len(KEYS) / 4
    again = medium.open()
    assert {key: served(again, key) for key in KEYS} == choice
    assert store.resolve(PROD).digest == a  # whoever has no key

    with pytest.raises(GenerationMismatch):
        store.split_alias("acme", "x", "prod", {a: 1, b: 1}, expected_generation=7)
    assert store.set_alias("acme", "x", "prod", a).weights == {}  # rolled back
    assert {served(store, key) for key in KEYS} == {a}


def test_what_holds_a_share_is_pointed_to(store: AdapterStore, versions: list[Version]) -> None:
    a, b, c = (version.digest for version in versions)
    store.split_alias("acme", "x", "prod", {a: 90, b: 10})
    for version in versions[:2]:
        with pytest.raises(InUse, match="prod"):
            store.withdraw(at(version))
    with pytest.raises(InUse, match="split"):
        store.withdraw(PROD)
    store.withdraw(at(versions[1]), VersionState.DRAINING)
    assert {served(store, key) for key in KEYS} == {a}  # its share goes to the rest
    store.withdraw(at(versions[1]), force=True)
    assert store.aliases("acme", "x")[1].weights == {}
    assert {s.digest: s.aliases for s in store.summaries("acme")} == {a: ("prod",), c: ("latest",)}


@pytest.mark.parametrize("targets", [{}, {"first": 0}, {"first": -1, "second": 1}, {"first": 10_000_000}])
def test_bad_weights_are_refused(
    store: AdapterStore, versions: list[Version], targets: dict[str, int]
) -> None:
    names = {"first": versions[0].digest, "second": versions[1].digest}
    with pytest.raises(InvalidRef):
        store.split_alias("acme", "x", "prod", {names[name]: weight for name, weight in targets.items()})
    with pytest.raises(AdapterNotFound):
        store.split_alias("acme", "x", "prod", {versions[0].digest: 1, "sha256:" + "0" * 64: 1})
