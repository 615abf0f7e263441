"""Listings, and what is told of changes."""

from collections.abc import Callable
from pathlib import Path

from adapter_store import (
    AdapterStore,
    ModelSpec,
    Ref,
    Version,
    VersionState,
)
from tests.support.stores.media import Medium, at, collected, versions_in


def test_summaries_tell_what_listings_show(
    store: AdapterStore, versions: list[Version], adapters: list[Path], spec: ModelSpec
) -> None:
    for name in ("a", "a-b", "a.b", "a_b", "b", "a0"):
        for folder in adapters:
            store.put(folder, "acme", name, spec)
    store.set_protected("acme", "x", versions[0].digest, True)
    store.withdraw(at(versions[1]))
    found = store.summaries("acme")
    assert [(s.name, s.digest, s.max_rank, s.num_bytes, s.created_at, s.protected) for s in found] == [
        (v.name, v.digest, v.manifest.max_rank, v.manifest.num_bytes, v.created_at, v.protected)
        for v in versions_in(store, "acme")
    ]
    assert (len(found), store.count("acme"), store.count("zoo")) == (20, 21, 0)  # one is DELETED
    assert [s.aliases for s in found if s.digest == versions[2].digest][-1] == ("latest",)
    everything = store.summaries("acme", deleted=True)
    assert [s.digest for s in everything if s.state is VersionState.DELETED] == [versions[1].digest]
    paged = []
    while page := store.summaries("acme", after=paged[-1].key if paged else "", limit=3):
        paged += page
    assert paged == found
    assert {s.name for s in store.summaries("acme", name="a.b")} == {"a.b"}
    assert store.summaries("acme", name="a.b", after=paged[-1].key) == []
    assert store.summaries("acme", name="nobody") == store.summaries("zoo") == []


def test_a_listing_begins_at_any_text(store: AdapterStore, adapters: list[Path], spec: ModelSpec) -> None:
    names = ["a-1", "a-b", "a.b", "a0", "a", "a_b", "ab", "b"]  # "@" follows the name in a key
    for name in names:
        store.put(adapters[0], "acme", name, spec)
    for after in ("", "a", "a-", "a-1", "a.", "a0", "aa", "ab", "b", "c"):
        found = [each.name for each in store.summaries("acme", after=after)]
        assert found == [name for name in names if f"{name}@" > after], after


def test_listings_follow_what_other_processes_do(
    store: AdapterStore, medium: Medium, adapters: list[Path], spec: ModelSpec
) -> None:
    other = medium.open()
    for name in ("b", "a", "c"):
        other.put(adapters[0], "acme", name, spec)
    assert [s.name for s in store.summaries("acme")] == ["a", "b", "c"]
    other.set_alias("acme", "a", "prod", other.resolve(Ref.parse("acme/a", "")).digest)
    assert store.summaries("acme", limit=1)[0].aliases == ("latest", "prod")
    other.delete(Ref.parse("acme/c", ""))
    other.put(adapters[1], "zoo", "z", spec)
    assert [s.name for s in store.summaries("acme")] == ["a", "b"]


def changed(store: AdapterStore, action: Callable[[], object]) -> set[tuple[str, str]] | None:
    before = store.news(-1).number
    action()
    names = store.news(before).names
    return None if names is None else set(names)


def test_news_name_what_changed(
    store: AdapterStore, versions: list[Version], medium: Medium, adapters: list[Path], spec: ModelSpec
) -> None:
    other = medium.open()
    a = versions[0].digest
    assert changed(store, lambda: None) == set()
    assert changed(store, lambda: other.set_alias("acme", "x", "prod", a)) == {("acme", "x")}
    assert changed(store, lambda: other.set_alias("acme", "x", "prod", a)) == set()
    assert changed(store, lambda: other.put(adapters[0], "zoo", "y", spec)) == {("zoo", "y")}

    def several() -> None:
        other.delete_alias("acme", "x", "prod")
        other.delete(Ref.parse("zoo/y", ""))
        other.withdraw(at(versions[0]))

    assert changed(store, several) == {("acme", "x"), ("zoo", "y")}
    assert changed(store, lambda: collected(other)) == {("acme", "x")}
    assert store.news(-1).names is None
    assert store.news(store.news(-1).number + 5).names is None  # of another store, or one that was restored
