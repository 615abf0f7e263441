import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from adapter_store import (
    AdapterNotFound,
    DataLoss,
    DiskStore,
    GenerationMismatch,
    InUse,
    InvalidRef,
    Manifest,
    ModelSpec,
    Ref,
    StoreUnavailable,
    Version,
    open_store,
)
from tests.support.adapters import edit_config

UNKNOWN = "sha256:" + "0" * 64


@pytest.fixture
def versions(store: DiskStore, adapters: list[Path], spec: ModelSpec) -> list[Version]:
    """Three versions of acme/x, pushed in order: latest is the last one."""
    return [store.put(folder, "acme", "x", spec) for folder in adapters]


def at(version: Version) -> Ref:
    return Ref(version.tenant, version.name, digest=version.digest)


def test_a_push_is_idempotent_and_named_by_content(store: DiskStore, adapter: Path, spec: ModelSpec) -> None:
    first = store.put(adapter, "acme", "x", spec)
    edit_config(adapter, base_model_name_or_path="elsewhere/d0", lora_dropout=0.3, lora_alpha=8.0)
    moved = shutil.move(adapter, adapter.parent / "moved")
    assert store.put(Path(moved), "acme", "x", spec) == first
    other = store.put(Path(moved), "zoo", "y", spec)
    assert (other.digest, other.tenant, other.name) == (first.digest, "zoo", "y")
    edit_config(Path(moved), lora_alpha=9)
    assert store.put(Path(moved), "acme", "x", spec).digest != first.digest


def test_files_overwritten_in_place_make_a_new_version(
    store: DiskStore, tmp_path: Path, adapters: list[Path], spec: ModelSpec
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
    adapters: list[Path], spec: ModelSpec, tmp_path: Path
) -> None:
    stores = [DiskStore(tmp_path / name) for name in "ab"]
    first, second = (store.put(adapters[0], "acme", "x", spec) for store in stores)
    assert first.manifest == second.manifest


def test_a_dry_run_checks_and_keeps_nothing(
    store: DiskStore, adapter: Path, spec: ModelSpec, tmp_path: Path, leftovers: Callable[[Path], list[str]]
) -> None:
    tried = store.put(adapter, "acme", "x", spec, dry_run=True)
    assert leftovers(tmp_path / "store") == []
    assert store.put(adapter, "acme", "x", spec).manifest == tried.manifest


def test_the_packed_file_is_plain_safetensors(
    store: DiskStore, versions: list[Version], tmp_path: Path
) -> None:
    blob = tmp_path / "store" / "blobs" / versions[0].digest.removeprefix("sha256:")
    with safe_open(blob / "packed.safetensors", "np") as file:
        assert sorted(file.keys()) == ["layers.0.q_proj.lora_a", "layers.0.q_proj.lora_b"]
        assert file.metadata()["modules"] == '[["layers.0.q_proj", 4, 2.0]]'
    assert (blob / "packed.safetensors").stat().st_size == versions[0].manifest.num_bytes


def test_manifests_survive_json(versions: list[Version]) -> None:
    assert Manifest.from_json(versions[0].manifest.to_json()) == versions[0].manifest
    with pytest.raises(DataLoss):
        Manifest.from_json("{}")


def test_weights_are_closed_for_new_views_only(store: DiskStore, versions: list[Version]) -> None:
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
    store: DiskStore, versions: list[Version], spec: ModelSpec
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
    store: DiskStore, versions: list[Version], adapters: list[Path], spec: ModelSpec, tmp_path: Path
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
    store: DiskStore, adapters: list[Path], spec: ModelSpec, tmp_path: Path, bad: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
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
    assert sorted(tmp_path.rglob("*")) == before


def test_aliases_count_their_moves(store: DiskStore, versions: list[Version]) -> None:
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


def test_a_recreated_alias_is_not_mistaken_for_the_old_one(store: DiskStore, versions: list[Version]) -> None:
    a, b, _ = (version.digest for version in versions)
    store.set_alias("acme", "x", "prod", a)
    store.delete_alias("acme", "x", "prod")
    with pytest.raises(AdapterNotFound):
        store.delete_alias("acme", "x", "prod")
    with pytest.raises(GenerationMismatch):
        store.set_alias("acme", "x", "prod", b, expected_generation=1)
    assert store.set_alias("acme", "x", "prod", b, expected_generation=0).generation == 2


def test_a_push_with_a_stale_generation_stores_nothing(
    store: DiskStore, versions: list[Version], adapter: Path, spec: ModelSpec
) -> None:
    with pytest.raises(GenerationMismatch):
        store.put(adapter, "acme", "x", spec, expected_generation=2)
    assert len(store.list("acme")) == 3
    assert store.put(adapter, "acme", "x", spec, expected_generation=3) == store.resolve(
        Ref.parse("acme/x", "")
    )


def test_a_push_without_alias_moves_nothing(
    store: DiskStore, versions: list[Version], adapter: Path, spec: ModelSpec
) -> None:
    pushed = store.put(adapter, "acme", "x", spec, alias=None)
    assert store.resolve(Ref.parse("acme/x", "")) == versions[2]
    assert store.resolve(at(pushed)) == pushed


def test_list_pages_in_the_order_of_name_and_digest(
    store: DiskStore, adapters: list[Path], spec: ModelSpec
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


def test_delete_is_refused_while_something_points_there(store: DiskStore, versions: list[Version]) -> None:
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
    store: DiskStore, versions: list[Version], tmp_path: Path, leftovers: Callable[[Path], list[str]]
) -> None:
    for version in versions[:2]:
        store.delete(at(version))
    store.delete(Ref.parse("acme/x", ""))
    for ref in (at(versions[0]), Ref.parse("acme/x", "")):
        with pytest.raises(AdapterNotFound):
            store.delete(ref)
    with pytest.raises(AdapterNotFound):
        store.open(versions[0].digest)
    assert leftovers(tmp_path / "store") == []


def test_content_lives_until_its_last_name_goes(
    store: DiskStore, versions: list[Version], adapters: list[Path], spec: ModelSpec
) -> None:
    store.put(adapters[0], "zoo", "y", spec)
    store.delete(at(versions[0]))
    store.open(versions[0].digest).close()
    store.delete(Ref.parse("zoo/y", ""))
    with pytest.raises(AdapterNotFound):
        store.open(versions[0].digest)


# ---- bytes


def test_export_gives_back_the_first_push(
    store: DiskStore, adapter: Path, spec: ModelSpec, tmp_path: Path
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


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        flip_last_byte,
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-8]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"4, 2.0", b"4, 4.0")),
    ],
)
@pytest.mark.parametrize("fresh", [True, False])
def test_damaged_weights_are_data_loss_until_pushed_again(
    store: DiskStore,
    versions: list[Version],
    adapters: list[Path],
    spec: ModelSpec,
    tmp_path: Path,
    damage: Callable[[Path], None],
    fresh: bool,
) -> None:
    store.open(versions[0].digest).close()
    blob = tmp_path / "store" / "blobs" / versions[0].digest.removeprefix("sha256:")
    damage(blob / "packed.safetensors")
    reader = DiskStore(tmp_path / "store") if fresh else store
    with pytest.raises(DataLoss):
        reader.open(versions[0].digest)
    with pytest.raises(DataLoss):
        reader.verify(at(versions[0]))
    reader.put(adapters[0], "acme", "x", spec)
    reader.open(versions[0].digest).close()
    assert reader.verify(at(versions[0])).digest == versions[0].digest


def test_the_manifest_is_covered_by_the_digest(
    store: DiskStore, versions: list[Version], tmp_path: Path
) -> None:
    manifest = tmp_path / "store" / "blobs" / versions[0].digest.removeprefix("sha256:") / "manifest.json"
    text = manifest.read_text()
    for old, new in (
        ('"rank": 4', '"rank": 5'),
        ('"scale": 2.0', '"scale": 3.0'),
        ('template": null', 'template": ""'),
    ):
        assert old in text
        manifest.write_text(text.replace(old, new))
        with pytest.raises(DataLoss):
            DiskStore(tmp_path / "store").open(versions[0].digest)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_damaged_source_files_are_found(
    store: DiskStore, versions: list[Version], tmp_path: Path, name: str
) -> None:
    blob = tmp_path / "store" / "blobs" / versions[0].digest.removeprefix("sha256:")
    flip_last_byte(blob / "source" / name)
    with pytest.raises(DataLoss, match=name):
        store.verify(at(versions[0]))
    with pytest.raises(DataLoss, match=name):
        store.export(at(versions[0]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_record_is_data_loss_for_that_name_only(
    store: DiskStore, versions: list[Version], adapters: list[Path], spec: ModelSpec, tmp_path: Path
) -> None:
    other = store.put(adapters[0], "acme", "y", spec)
    (tmp_path / "store" / "names" / "acme" / "x.json").write_text("{")
    reopened = DiskStore(tmp_path / "store")
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
    store: DiskStore, adapters: list[Path], spec: ModelSpec, tmp_path: Path
) -> None:
    heard = threading.Event()
    stop = store.watch(heard.set)
    assert not heard.is_set()
    DiskStore(tmp_path / "store").put(adapters[0], "acme", "x", spec)
    assert heard.wait(60)
    heard.clear()
    store.put(adapters[0], "acme", "x", spec)  # changes nothing
    stop()
    store.put(adapters[1], "acme", "x", spec)
    assert not heard.is_set()


def test_a_failing_watcher_keeps_watching(store: DiskStore, adapters: list[Path], spec: ModelSpec) -> None:
    calls = threading.Semaphore(0)

    def fail() -> None:
        calls.release()
        raise RuntimeError("a bug in the callback")

    stop = store.watch(fail)
    for folder in adapters[:2]:
        store.put(folder, "acme", "x", spec)
        assert calls.acquire(timeout=60)
    stop()


@pytest.mark.parametrize("prefix", ["", "disk:"])
def test_open_store(prefix: str, tmp_path: Path, adapters: list[Path], spec: ModelSpec) -> None:
    store = open_store(f"{prefix}{tmp_path / 'deep' / 'store'}")
    assert store.put(adapters[0], "acme", "x", spec) == store.resolve(Ref.parse("acme/x", ""))


@pytest.mark.parametrize("url", ["", "disk:", "s3://bucket", "redis://localhost"])
def test_unknown_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidRef, match="store url"):
        open_store(url)


def test_a_store_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable):
        DiskStore(tmp_path / "file" / "store")
