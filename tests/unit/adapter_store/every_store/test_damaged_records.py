"""A record that cannot be read: what it hides, and how to get rid of it."""

from pathlib import Path

import pytest

from adapter_store import AdapterNotFound, AdapterStore, DataLoss, ModelSpec, Ref, Version
from tests.support.stores.media import Change, DiskMedium, Medium, RedisMedium, at, collected, versions_in

DAMAGE: list[Change] = [lambda record: b"{", lambda record: record[:-1] + b"?", lambda record: b""]


def test_a_damaged_record_hides_no_aliases_of_others_and_is_told(
    store: AdapterStore, versions: list[Version], adapters: list[Path], spec: ModelSpec, medium: Medium
) -> None:
    store.put(adapters[0], "acme", "y", spec)
    assert store.damaged("acme") == []
    medium.change_record("acme", "x", lambda record: record[:-1] + b"?")
    again = medium.open()
    for each in (store, again):
        assert [(alias.name, alias.alias) for alias in each.aliases("acme")] == [("y", "latest")]
        with pytest.raises(DataLoss):
            each.aliases("acme", "x")
        assert each.orphans() == []  # it may have them all
        assert (each.damaged("acme"), each.damaged("zoo")) == (["x"], [])


def test_a_damaged_record_is_left_out_of_a_listing_and_nothing_else(
    versions: list[Version], store: AdapterStore, adapters: list[Path], spec: ModelSpec, medium: Medium
) -> None:
    store.put(adapters[0], "acme", "y", spec)
    medium.change_record("acme", "x", lambda record: b"{")
    assert "y" in [s.name for s in medium.open().summaries("acme")]


def test_a_damaged_record_is_data_loss_for_that_name_only(
    store: AdapterStore, versions: list[Version], adapters: list[Path], spec: ModelSpec, medium: Medium
) -> None:
    other = store.put(adapters[0], "acme", "y", spec)
    medium.change_record("acme", "x", lambda record: b"{")
    reopened = medium.open()
    with pytest.raises(DataLoss, match="acme/x is damaged: `lorafleet adapters rm-damaged`"):
        reopened.resolve(Ref.parse("acme/x", ""))
    assert reopened.resolve(at(other)) == other
    for version in versions:  # the record may be repaired: what it named is kept
        reopened.open(version.digest).close()


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_given_up_and_its_content_collected_in_its_time(
    versions: list[Version],
    store: AdapterStore,
    adapters: list[Path],
    spec: ModelSpec,
    medium: Medium,
    damage: Change,
) -> None:
    """The state of one of its versions was DELETED, one was protected, and one is another name's, too."""
    shared = store.put(adapters[0], "acme", "y", spec)
    store.set_protected("acme", "x", versions[1].digest, True)
    store.withdraw(at(versions[0]))
    medium.change_record("acme", "x", damage)
    reader = medium.open()
    told = reader.delete_damaged("acme", "x", dry_run=True)
    assert reader.damaged("acme") == ["x"]
    found = reader.delete_damaged("acme", "x")
    assert [(each.digest, each.num_bytes) for each in told] == [
        (each.digest, each.num_bytes) for each in found
    ]
    assert {each.digest: each.num_bytes for each in found} == {
        version.digest: version.manifest.num_bytes for version in versions
    }
    for each in (store, reader, medium.open()):
        assert (each.damaged("acme"), each.aliases("acme", "x")) == ([], [])
        assert [s.name for s in each.summaries("acme")] == ["y"]
        assert {s.digest for s in each.summaries("acme", name="x", deleted=True)} == {
            version.digest for version in versions
        }
        for version in versions:
            with pytest.raises(AdapterNotFound):
                each.resolve(at(version))
    assert store.collect(3600, lambda _: False) == []  # who runs it reads it for its grace
    assert set(collected(store)) == {version.digest for version in versions}
    assert store.orphans() == [] and medium.digests() == {shared.digest}
    assert store.resolve(at(shared)) == shared
    with pytest.raises(AdapterNotFound):
        store.find(at(versions[1]))
    store.delete(Ref.parse("acme/y", ""))
    assert medium.leftovers() == []


def test_a_push_brings_back_what_was_given_up(
    versions: list[Version], store: AdapterStore, adapters: list[Path], spec: ModelSpec, medium: Medium
) -> None:
    medium.change_record("acme", "x", lambda record: b"{")
    medium.change_manifest(versions[1].digest, lambda manifest: b"{")
    reader = medium.open()
    assert {each.digest: each.num_bytes for each in reader.delete_damaged("acme", "x")} == {
        version.digest: 0 if version == versions[1] else version.manifest.num_bytes for version in versions
    }
    again = reader.put(adapters[0], "acme", "x", spec)
    assert again.digest == versions[0].digest and reader.resolve(Ref.parse("acme/x", "")) == again
    assert set(collected(reader)) == {version.digest for version in versions[1:]}


def test_a_record_that_is_lost_leaves_nothing_that_cannot_be_removed(
    versions: list[Version], store: AdapterStore, medium: Medium
) -> None:
    """Whoever took it away did not know what else names it: a folder tells of orphans, Redis of damage."""
    medium.change_record("acme", "x", lambda record: None)
    with pytest.raises(AdapterNotFound):
        store.resolve(at(versions[0]))
    if isinstance(medium, DiskMedium):
        assert medium.digests() == {version.digest for version in versions}
        assert len(store.orphans()) == 2 * len(versions) and medium.digests() < set(store.orphans())
        medium.open()  # removes them, as after a crash
    else:
        assert store.damaged("acme") == ["x"]
        assert len(store.delete_damaged("acme", "x")) == 3
        assert set(collected(store)) == {version.digest for version in versions}
    assert (medium.digests(), store.damaged("acme"), store.summaries("acme")) == (set(), [], [])


def test_a_record_that_can_be_read_is_not_given_up(store: AdapterStore, versions: list[Version]) -> None:
    for name in ("x", "nobody"):
        with pytest.raises(AdapterNotFound, match=f"acme/{name} has no damaged record"):
            store.delete_damaged("acme", name)
    assert len(versions_in(store, "acme")) == 3


def test_a_damaged_record_of_a_name_without_content_is_removed(
    store: AdapterStore, versions: list[Version], medium: Medium
) -> None:
    """As after a crash that came before the content: there is nothing to wait for."""
    for version in versions[:2]:
        store.delete(at(version))
    store.delete(Ref.parse("acme/x", ""))
    if isinstance(medium, DiskMedium):
        (medium.root / "names" / "acme" / "x.json").write_bytes(b"{")
    elif isinstance(medium, RedisMedium):
        with medium.server.client() as client:
            client.set(medium.keys.record("acme", "x"), b"{")
            client.zadd(medium.keys.names("acme"), {"x@": 0})
    assert medium.open().damaged("acme") == ["x"]
    assert store.delete_damaged("acme", "x") == []
    assert (store.damaged("acme"), medium.leftovers()) == ([], [])
