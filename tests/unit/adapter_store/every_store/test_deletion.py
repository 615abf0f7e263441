"""A version is removed at once, with the content that no other name has."""

from pathlib import Path

import pytest

from adapter_store import (
    AdapterNotFound,
    AdapterStore,
    InUse,
    ModelSpec,
    Ref,
    Version,
)
from tests.support.stores.media import Medium, at, versions_in


def test_delete_is_refused_while_something_points_there(store: AdapterStore, versions: list[Version]) -> None:
    first, second, third = versions
    store.set_protected("acme", "x", first.digest, True)
    assert store.resolve(at(first)).protected
    with pytest.raises(InUse, match="protected"):
        store.delete(at(first))
    with pytest.raises(InUse, match="alias 'latest'"):
        store.delete(at(third))
    store.set_alias("acme", "x", "prod", third.digest)
    with pytest.raises(InUse, match="alias 'prod'"):
        store.delete(Ref.parse("acme/x", ""))
    store.delete_alias("acme", "x", "prod")
    store.delete(Ref.parse("acme/x", ""))
    store.delete(at(second))
    store.set_protected("acme", "x", first.digest, False)
    store.delete(at(first))
    assert versions_in(store, "acme") == [] and store.aliases("acme") == []


def test_a_second_delete_finds_nothing_and_nothing_stays(
    store: AdapterStore, versions: list[Version], medium: Medium
) -> None:
    for version in versions[:2]:
        store.delete(at(version))
    store.delete(Ref.parse("acme/x", ""))
    for ref in (at(versions[0]), Ref.parse("acme/x", "")):
        with pytest.raises(AdapterNotFound):
            store.delete(ref)
    with pytest.raises(AdapterNotFound):
        store.open(versions[0].digest)
    assert medium.leftovers() == []


def test_content_lives_until_its_last_name_goes(
    store: AdapterStore, versions: list[Version], adapters: list[Path], spec: ModelSpec
) -> None:
    store.put(adapters[0], "zoo", "y", spec)
    store.delete(at(versions[0]))
    store.open(versions[0].digest).close()
    store.delete(Ref.parse("zoo/y", ""))
    with pytest.raises(AdapterNotFound):
        store.open(versions[0].digest)
