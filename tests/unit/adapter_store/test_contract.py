"""What every store does, whatever medium is behind it (test_disk.py, redis_store/: what only one does)."""

import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from adapter_store import (
    AdapterNotFound,
    AdapterStore,
    DataLoss,
    DiskStore,
    GenerationMismatch,
    InUse,
    InvalidRef,
    Manifest,
    ModelSpec,
    Ref,
    Version,
)
from tests.support.adapters import edit_config
from tests.support.stores import Change, Medium

UNKNOWN = "sha256:" + "0" * 64


@pytest.fixture
def store(medium: Medium) -> AdapterStore:
    return medium.open()


@pytest.fixture
def versions(store: AdapterStore, adapters: list[Path], spec: ModelSpec) -> list[Version]:
    """Three versions of acme/x, pushed in order: latest is the last one."""
    return [store.put(folder, "acme", "x", spec) for folder in adapters]


def at(version: Version) -> Ref:
    return Ref(version.tenant, version.name, digest=version.digest)


def test_a_push_is_idempotent_and_named_by_content(
    store: AdapterStore, adapter: Path, spec: ModelSpec
) -> None:
    first = store.put(adapter, "acme", "x", spec)
    edit_config(adapter, base_model_name_or_path="elsewhere/d0", lora_dropout=0.3, lora_alpha=8.0)
    moved = shutil.move(adapter, adapter.parent / "moved")
    assert store.put(Path(moved), "acme", "x", spec) == first
    other = store.put(Path(moved), "zoo", "y", spec)
    assert (other.digest, other.tenant, other.name) == (first.digest, "zoo", "y")
    edit_config(Path(moved), lora_alpha=9)
    assert store.put(Path(moved), "acme", "x", spec).digest != first.digest


def test_files_overwritten_in_place_make_a_new_version(
    store: AdapterStore, tmp_path: Path, adapters: list[Path], spec: ModelSpec
) -> None:
    folder = shutil.copytree(adapters[0], tmp_path / "a")
    first = store.put(folder, "acme", "x", spec)
    with store.open(first.digest) as weights:
        before = weights["layers.0.q_proj"].lora_a
        shutil.copyfile(adapters[1] / "adapter_model.safetensors", folder / "adapter_model.safetensors")
        second = store.put(folder, "acme", "x", spec)
        assert second.digest != first.digest
        assert store.resolve(Ref.parse("acme/x", "")).digest == second.digest
        assert np.array_equal(weights["layers.0.q_proj"].lora_a, before)  # in flight: wholly the old version
    with store.open(second.digest) as weights:
        assert np.array_equal(weights["layers.0.q_proj"].lora_a, before * 2)


def test_the_digest_is_a_fixed_function_of_the_content(
    store: AdapterStore, adapters: list[Path], spec: ModelSpec, tmp_path: Path
) -> None:
    stores = (store, DiskStore(tmp_path / "another"))
    first, second = (store.put(adapters[0], "acme", "x", spec) for store in stores)
    assert first.manifest == second.manifest


def test_a_dry_run_checks_and_keeps_nothing(
    store: AdapterStore, adapter: Path, spec: ModelSpec, medium: Medium
) -> None:
    tried = store.put(adapter, "acme", "x", spec, dry_run=True)
    assert medium.leftovers() == []
    assert store.put(adapter, "acme", "x", spec).manifest == tried.manifest


def test_manifests_survive_json(versions: list[Version]) -> None:
    assert Manifest.from_json(versions[0].manifest.to_json()) == versions[0].manifest
    with pytest.raises(DataLoss):
        Manifest.from_json("{}")


def test_weights_are_closed_for_new_views_only(store: AdapterStore, versions: list[Version]) -> None:
    with store.open(versions[0].digest) as weights:
        view = weights["layers.0.q_proj"].lora_a
        assert list(weights) == ["layers.0.q_proj"]
        with pytest.raises(KeyError):
            weights["layers.9.q_proj"]
    assert view.sum() != 0
    with pytest.raises(ValueError, match="closed"):
        weights["layers.0.q_proj"]


# ---- names, aliases, visibility


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
    assert store.list("zoo") == [] and store.aliases("zoo") == []


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
        lambda: store.put(adapters[0], "acme", "x", spec, alias=bad),
        lambda: store.list(bad),
        lambda: store.list("acme", name=bad),
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


def test_a_push_with_a_stale_generation_stores_nothing(
    store: AdapterStore, versions: list[Version], adapter: Path, spec: ModelSpec
) -> None:
    with pytest.raises(GenerationMismatch):
        store.put(adapter, "acme", "x", spec, expected_generation=2)
    assert len(store.list("acme")) == 3
    assert store.put(adapter, "acme", "x", spec, expected_generation=3) == store.resolve(
        Ref.parse("acme/x", "")
    )


def test_a_push_without_alias_moves_nothing(
    store: AdapterStore, versions: list[Version], adapter: Path, spec: ModelSpec
) -> None:
    pushed = store.put(adapter, "acme", "x", spec, alias=None)
    assert store.resolve(Ref.parse("acme/x", "")) == versions[2]
    assert store.resolve(at(pushed)) == pushed


def test_list_pages_in_the_order_of_name_and_digest(
    store: AdapterStore, adapters: list[Path], spec: ModelSpec
) -> None:
    for name in ("a", "a-b", "a.b", "a_b", "b", "a0"):
        for folder in adapters:
            store.put(folder, "acme", name, spec)
    keys = [f"{version.name}@{version.digest}" for version in store.list("acme")]
    assert keys == sorted(keys) and len(keys) == 18
    paged: list[str] = []
    while page := store.list("acme", after=paged[-1] if paged else "", limit=4):
        paged += [f"{version.name}@{version.digest}" for version in page]
    assert paged == keys
    assert [version.name for version in store.list("acme", name="a.b")] == ["a.b"] * 3


# ---- deletion


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
    assert store.list("acme") == [] and store.aliases("acme") == []


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


# ---- bytes


def test_export_gives_back_the_first_push(
    store: AdapterStore, adapter: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    (adapter / "README.md").write_text("not stored")
    pushed = {path.name: path.read_bytes() for path in adapter.iterdir() if path.name != "README.md"}
    store.put(adapter, "acme", "x", spec)
    edit_config(adapter, lora_dropout=0.5)
    store.put(adapter, "acme", "x", spec)
    store.export(Ref.parse("acme/x", ""), tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == pushed
    with pytest.raises(FileExistsError):
        store.export(Ref.parse("acme/x", ""), tmp_path / "out")
    again = DiskStore(tmp_path / "again").put(tmp_path / "out", "acme", "x", spec)
    assert again.digest == store.resolve(Ref.parse("acme/x", "")).digest


def flip_last_byte(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [
        flip_last_byte,
        lambda content: None,
        lambda content: b"",
        lambda content: content[:-8],
        lambda content: content.replace(b"4, 2.0", b"4, 4.0"),
    ],
)
@pytest.mark.parametrize("fresh", [True, False])
def test_damaged_weights_are_data_loss_until_pushed_again(
    store: AdapterStore,
    versions: list[Version],
    adapters: list[Path],
    spec: ModelSpec,
    medium: Medium,
    damage: Change,
    fresh: bool,
) -> None:
    store.open(versions[0].digest).close()
    medium.change_packed(versions[0].digest, damage)
    reader = medium.open() if fresh else store
    with pytest.raises(DataLoss):
        reader.open(versions[0].digest)
    with pytest.raises(DataLoss):
        reader.verify(at(versions[0]))
    reader.open(versions[1].digest).close()
    reader.put(adapters[0], "acme", "x", spec)
    reader.open(versions[0].digest).close()
    assert reader.verify(at(versions[0])).digest == versions[0].digest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"rank": 4', b'"rank": 5'),
        (b'"scale": 2.0', b'"scale": 3.0'),
        (b'template": null', b'template": ""'),
    ],
)
def test_the_manifest_is_covered_by_the_digest(
    versions: list[Version], medium: Medium, old: bytes, new: bytes
) -> None:
    def change(manifest: bytes) -> bytes:
        assert old in manifest
        return manifest.replace(old, new)

    medium.change_manifest(versions[0].digest, change)
    with pytest.raises(DataLoss):
        medium.open().open(versions[0].digest)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_damaged_source_files_are_found(
    store: AdapterStore, versions: list[Version], medium: Medium, tmp_path: Path, name: str
) -> None:
    medium.change_source(versions[0].digest, name, flip_last_byte)
    with pytest.raises(DataLoss, match=f"{name}|recipe"):
        store.verify(at(versions[0]))
    with pytest.raises(DataLoss, match=f"{name}|recipe"):
        store.export(at(versions[0]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_record_is_data_loss_for_that_name_only(
    store: AdapterStore, versions: list[Version], adapters: list[Path], spec: ModelSpec, medium: Medium
) -> None:
    other = store.put(adapters[0], "acme", "y", spec)
    medium.change_record("acme", "x", lambda record: b"{")
    reopened = medium.open()
    with pytest.raises(DataLoss):
        reopened.resolve(Ref.parse("acme/x", ""))
    assert reopened.resolve(at(other)) == other
    for version in versions:  # the record may be repaired: what it named is kept
        reopened.open(version.digest).close()


def test_what_a_push_takes_and_gives_crosses_processes(versions: list[Version], spec: ModelSpec) -> None:
    for value in (spec, versions[0], at(versions[0]), DataLoss("gone")):
        again = pickle.loads(pickle.dumps(value))
        assert again == value or str(again) == str(value)


# ---- the rest


def test_watchers_hear_of_changes_by_other_stores(
    store: AdapterStore, adapters: list[Path], spec: ModelSpec, medium: Medium
) -> None:
    heard = threading.Event()
    stop = store.watch(heard.set)
    assert not heard.is_set()
    medium.open().put(adapters[0], "acme", "x", spec)
    assert heard.wait(60)
    heard.clear()
    store.put(adapters[0], "acme", "x", spec)  # changes nothing
    stop()
    store.put(adapters[1], "acme", "x", spec)
    assert not heard.is_set()


def test_a_failing_watcher_keeps_watching(store: AdapterStore, adapters: list[Path], spec: ModelSpec) -> None:
    calls = threading.Semaphore(0)

    def fail() -> None:
        calls.release()
        raise RuntimeError("a bug in the callback")

    stop = store.watch(fail)
    for folder in adapters[:2]:
        store.put(folder, "acme", "x", spec)
        assert calls.acquire(timeout=60)
    stop()
