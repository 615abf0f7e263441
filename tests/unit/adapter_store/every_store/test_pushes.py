"""A push makes a version of its content; an export gives that back."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from adapter_store import (
    AdapterStore,
    DataLoss,
    DiskStore,
    GenerationMismatch,
    InvalidAdapter,
    Manifest,
    ModelSpec,
    PushOptions,
    Ref,
    Version,
)
from tests.support.adapters.peft import edit_config, read_tensors, rewrite
from tests.support.stores.media import Medium, at, versions_in


def test_a_push_is_idempotent_and_named_by_content(
    store: AdapterStore, adapter: Path, spec: ModelSpec
) -> None:
    first = store.put(adapter, "acme", "x", spec)
    moved = shutil.move(adapter, adapter.parent / "moved")
    assert store.put(Path(moved), "acme", "x", spec) == first
    edit_config(Path(moved), base_model_name_or_path="elsewhere/d0", lora_dropout=0.3, lora_alpha=8.0)
    assert store.put(Path(moved), "acme", "x", spec).digest == first.digest
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


@pytest.mark.parametrize("dry_run", [False, True], ids=["push", "dry run"])
def test_values_that_are_no_numbers_are_refused_and_nothing_is_kept(
    store: AdapterStore, adapter: Path, spec: ModelSpec, dry_run: bool
) -> None:
    *_, last = sorted(read_tensors(adapter))
    rewrite(adapter, lambda tensors: tensors | {last: tensors[last] * float("inf")})
    with pytest.raises(InvalidAdapter, match=f"{last}' holds NaN or infinity"):
        store.put(adapter, "acme", "x", spec, PushOptions(dry_run=dry_run))
    assert versions_in(store, "acme") == []


def test_a_dry_run_checks_and_keeps_nothing(
    store: AdapterStore, adapter: Path, spec: ModelSpec, medium: Medium
) -> None:
    tried = store.put(adapter, "acme", "x", spec, PushOptions(dry_run=True))
    assert medium.leftovers() == []
    assert store.put(adapter, "acme", "x", spec).manifest == tried.manifest


def test_a_push_with_a_stale_generation_stores_nothing(
    store: AdapterStore, versions: list[Version], adapter: Path, spec: ModelSpec
) -> None:
    with pytest.raises(GenerationMismatch):
        store.put(adapter, "acme", "x", spec, PushOptions(expected_generation=2))
    assert len(versions_in(store, "acme")) == 3
    assert store.put(adapter, "acme", "x", spec, PushOptions(expected_generation=3)) == store.resolve(
        Ref.parse("acme/x", "")
    )


def test_a_push_without_alias_moves_nothing(
    store: AdapterStore, versions: list[Version], adapter: Path, spec: ModelSpec
) -> None:
    pushed = store.put(adapter, "acme", "x", spec, PushOptions(alias=None))
    assert store.resolve(Ref.parse("acme/x", "")) == versions[2]
    assert store.resolve(at(pushed)) == pushed


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


def test_export_gives_back_what_was_pushed(
    store: AdapterStore, adapter: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    (adapter / "README.md").write_text("# Mine")
    (adapter / "optimizer.pt").write_text("not stored")
    pushed = {path.name: path.read_bytes() for path in adapter.iterdir() if path.name != "optimizer.pt"}
    store.put(adapter, "acme", "x", spec)
    store.export(Ref.parse("acme/x", ""), tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == pushed
    with pytest.raises(FileExistsError):
        store.export(Ref.parse("acme/x", ""), tmp_path / "out")
    again = DiskStore(tmp_path / "again").put(tmp_path / "out", "acme", "x", spec)
    assert again.digest == store.resolve(Ref.parse("acme/x", "")).digest


def test_what_a_push_takes_and_gives_crosses_processes(versions: list[Version], spec: ModelSpec) -> None:
    for value in (spec, versions[0], at(versions[0]), DataLoss("gone")):
        again = pickle.loads(pickle.dumps(value))
        assert again == value or str(again) == str(value)
