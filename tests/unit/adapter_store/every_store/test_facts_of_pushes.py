"""What a push says beside its content is its own name's: no other tenant or earlier push shows in it."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from adapter_store import AdapterNotFound, AdapterStore, DataLoss, ModelSpec, Ref, Version
from tests.support.adapters.peft import edit_config, read_tensors
from tests.support.stores.media import Medium, at, collected, versions_in

RED, BLUE = "/home/red/secret/base", "hub/blue-base"


@pytest.fixture
def folders(adapter: Path, tmp_path: Path) -> dict[str, Path]:
    """The same weights from two tenants, who call the base otherwise, have other files beside them, and other
    words in the header of the weights file."""
    red, blue = (Path(shutil.copytree(adapter, tmp_path / name)) for name in ("red", "blue"))
    for folder, base in ((red, RED), (blue, BLUE)):
        edit_config(folder, base_model_name_or_path=base)
        (folder / "README.md").write_text(f"trained on {base}")
        (folder / "tokenizer_config.json").write_text(json.dumps({"name_or_path": base}))
    save_file(read_tensors(blue), blue / "adapter_model.safetensors", metadata={"trainer": "blue's"})
    return {"red": red, "blue": blue}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def warned(version: Version) -> str:
    return " ".join(warning.message for warning in version.push.warnings)


def test_tenants_see_only_their_own(
    store: AdapterStore, folders: dict[str, Path], spec: ModelSpec, tmp_path: Path, medium: Medium
) -> None:
    pushed = {tenant: store.put(folder, tenant, "x", spec) for tenant, folder in folders.items()}
    assert pushed["red"].digest == pushed["blue"].digest and len(medium.digests()) == 1
    for tenant, base, other in (("red", RED, BLUE), ("blue", BLUE, RED)):
        ref = at(pushed[tenant])
        for version in (pushed[tenant], store.find(ref), store.resolve(ref), *versions_in(store, tenant)):
            assert version.push.base_model == base
            assert base in warned(version) and other not in warned(version)
        assert [each.base_model for each in store.summaries(tenant)] == [base]
        store.verify(ref)
        store.export(ref, tmp_path / "out" / tenant)
        assert contents(tmp_path / "out" / tenant) == contents(folders[tenant])


def test_who_names_no_base_hides_no_warning_of_who_names_a_wrong_one(
    store: AdapterStore, folders: dict[str, Path], spec: ModelSpec
) -> None:
    edit_config(folders["red"], base_model_name_or_path=None)
    assert store.put(folders["red"], "red", "x", spec).push.warnings == ()
    assert BLUE in warned(store.put(folders["blue"], "blue", "x", spec))


def test_the_last_push_of_a_name_counts(
    store: AdapterStore, folders: dict[str, Path], spec: ModelSpec, tmp_path: Path, medium: Medium
) -> None:
    first = store.put(folders["red"], "acme", "x", spec)
    before = len(medium.leftovers())
    second = store.put(folders["blue"], "acme", "x", spec)
    assert (second.digest, second.created_at) == (first.digest, first.created_at)
    assert BLUE in warned(second) and RED not in warned(store.find(at(second)))
    store.export(at(first), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folders["blue"])
    assert len(medium.leftovers()) == before  # what the first one brought is gone


def test_the_same_push_again_changes_nothing(
    store: AdapterStore, folders: dict[str, Path], spec: ModelSpec, medium: Medium
) -> None:
    first = store.put(folders["red"], "acme", "x", spec)
    number, kept = store.news(-1).number, medium.leftovers()
    assert store.put(folders["red"], "acme", "x", spec) == first
    assert (store.news(-1).number, medium.leftovers()) == (number, kept)


def test_what_one_tenant_removes_the_other_keeps(
    store: AdapterStore, folders: dict[str, Path], spec: ModelSpec, tmp_path: Path, medium: Medium
) -> None:
    red, blue = (store.put(folder, tenant, "x", spec) for tenant, folder in folders.items())
    store.withdraw(Ref.parse("red/x", ""))
    assert collected(store) == [red.digest]
    with pytest.raises(AdapterNotFound):
        store.export(at(red), tmp_path / "none")
    store.export(at(blue), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folders["blue"])
    assert store.orphans() == []
    store.delete(Ref.parse("blue/x", ""))
    assert medium.leftovers() == []


def test_a_push_by_another_repairs_the_content_and_leaves_the_files(
    store: AdapterStore, folders: dict[str, Path], spec: ModelSpec, tmp_path: Path, medium: Medium
) -> None:
    red = store.put(folders["red"], "red", "x", spec)
    medium.change_packed(red.digest, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    medium.open().put(folders["blue"], "blue", "x", spec)
    medium.open().export(at(red), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folders["red"])


def test_pushed_files_of_another_name_are_never_taken_for_its_own(
    store: AdapterStore, folders: dict[str, Path], spec: ModelSpec, medium: Medium
) -> None:
    red, blue = (store.put(folder, tenant, "x", spec) for tenant, folder in folders.items())
    medium.swap_pushed(red, blue)
    for version in (red, blue):
        with pytest.raises(DataLoss):
            medium.open().verify(at(version))
