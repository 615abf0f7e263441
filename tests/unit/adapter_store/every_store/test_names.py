"""Names, aliases, and who sees what."""

from collections.abc import Callable
from pathlib import Path

import pytest

from adapter_store import (
    AdapterNotFound,
    AdapterStore,
    GenerationMismatch,
    InvalidRef,
    ModelSpec,
    PushOptions,
    Ref,
    Version,
)
from tests.support.stores.media import Medium, versions_in

UNKNOWN = "sha256:" + "0" * 64


def test_unknown_and_foreign_names_look_the_same(
    store: AdapterStore, versions: list[Version], spec: ModelSpec
) -> None:
    def text(ref: Ref) -> str:
        with pytest.raises(AdapterNotFound) as error:
            store.resolve(ref)
        return str(error.value)

    assert text(Ref.parse("zoo/x", "")) == text(Ref.parse("zoo/nope", "")).replace("nope", "x")
    digest = versions[0].digest
    assert text(Ref("zoo", "x", digest=digest)) == text(Ref("zoo", "x", digest=UNKNOWN)).replace(
        UNKNOWN, digest
    )
    assert "acme/y@latest" in text(Ref.parse("acme/y", ""))
    assert versions_in(store, "zoo") == [] and store.aliases("zoo") == []


def test_a_digest_belongs_to_its_name(
    store: AdapterStore, versions: list[Version], adapters: list[Path], spec: ModelSpec, tmp_path: Path
) -> None:
    """acme/x has the content, acme/z exists, too: z@digest is still nobody."""
    digest = versions[0].digest
    other = store.put(adapters[1], "acme", "z", spec)
    assert other.digest != digest
    wrong = Ref("acme", "z", digest=digest)
    calls: list[Callable[[], object]] = [
        lambda: store.resolve(wrong),
        lambda: store.verify(wrong),
        lambda: store.export(wrong, tmp_path / "exported"),
        lambda: store.delete(wrong),
        lambda: store.set_alias("acme", "z", "latest", digest),
        lambda: store.set_protected("acme", "z", digest, True),
    ]
    for call in calls:
        with pytest.raises(AdapterNotFound):
            call()
    assert store.resolve(Ref.parse("acme/z", "")).digest == other.digest
    store.open(digest).close()


@pytest.mark.parametrize("bad", ["../other", "/abs", "a/../../b", "a\0b", "", ".", "a" * 300, "a ", "A"])
def test_bad_names_never_reach_the_disk(
    store: AdapterStore, adapters: list[Path], spec: ModelSpec, medium: Medium, tmp_path: Path, bad: str
) -> None:
    before = sorted(tmp_path.rglob("*")), medium.leftovers()
    calls: list[Callable[[], object]] = [
        lambda: store.put(adapters[0], bad, "x", spec),
        lambda: store.put(adapters[0], "acme", bad, spec),
        lambda: store.put(adapters[0], "acme", "x", spec, PushOptions(alias=bad)),
        lambda: versions_in(store, bad),
        lambda: versions_in(store, "acme", name=bad),
        lambda: store.aliases(bad),
        lambda: store.delete_alias("acme", bad, "latest"),
        lambda: store.set_alias("acme", "x", bad, UNKNOWN),
        lambda: store.set_protected("acme", bad, UNKNOWN, True),
        lambda: store.delete(Ref.parse(f"acme/{bad}", "acme")),
        lambda: store.open(bad),
    ]
    for call in calls:
        with pytest.raises(InvalidRef):
            call()
    assert (sorted(tmp_path.rglob("*")), medium.leftovers()) == before


def test_aliases_count_their_moves(store: AdapterStore, versions: list[Version]) -> None:
    a, b, _ = (version.digest for version in versions)
    assert store.set_alias("acme", "x", "prod", a).generation == 1
    assert store.set_alias("acme", "x", "prod", a).generation == 1
    assert store.set_alias("acme", "x", "prod", b, expected_generation=1).generation == 2
    with pytest.raises(GenerationMismatch, match="at generation 2, not 1"):
        store.set_alias("acme", "x", "prod", a, expected_generation=1)
    with pytest.raises(AdapterNotFound):
        store.set_alias("acme", "x", "prod", UNKNOWN)
    with pytest.raises(AdapterNotFound):
        store.set_alias("acme", "y", "prod", a)
    assert [(each.alias, each.generation) for each in store.aliases("acme")] == [("latest", 3), ("prod", 2)]


def test_a_recreated_alias_is_not_mistaken_for_the_old_one(
    store: AdapterStore, versions: list[Version]
) -> None:
    a, b, _ = (version.digest for version in versions)
    store.set_alias("acme", "x", "prod", a)
    store.delete_alias("acme", "x", "prod")
    with pytest.raises(AdapterNotFound):
        store.delete_alias("acme", "x", "prod")
    with pytest.raises(GenerationMismatch):
        store.set_alias("acme", "x", "prod", b, expected_generation=1)
    assert store.set_alias("acme", "x", "prod", b, expected_generation=0).generation == 2


def test_list_pages_in_the_order_of_name_and_digest(
    store: AdapterStore, adapters: list[Path], spec: ModelSpec
) -> None:
    for name in ("a", "a-b", "a.b", "a_b", "b", "a0"):
        for folder in adapters:
            store.put(folder, "acme", name, spec)
    keys = [f"{version.name}@{version.digest}" for version in versions_in(store, "acme")]
    assert keys == sorted(keys) and len(keys) == 18
    paged: list[str] = []
    while page := versions_in(store, "acme", after=paged[-1] if paged else "", limit=4):
        paged += [f"{version.name}@{version.digest}" for version in page]
    assert paged == keys
    assert [version.name for version in versions_in(store, "acme", name="a.b")] == ["a.b"] * 3
