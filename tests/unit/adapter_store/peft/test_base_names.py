"""One base has many names: what is the served one's is not warned of, nor refused by `strict_base`."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from adapter_store import DiskStore, IncompatibleAdapter, ModelSpec, PushOptions
from tests.support.adapters.peft import edit_config

COMMIT = "7683fea62db869066ddaff6a41d032262c490d4f"


@pytest.fixture
def named(d0: Path, tmp_path: Path) -> ModelSpec:
    return ModelSpec.from_folder(shutil.copytree(d0, tmp_path / "Tiny2.5-1B-Chat"))


@pytest.mark.parametrize(
    "name",
    [
        "maker/Tiny2.5-1B-Chat",
        "/models/Tiny2.5-1B-Chat/",
        "./Tiny2.5-1B-Chat/.",
        r"D:\models\Tiny2.5-1B-Chat",
        "D:\\models\\Tiny2.5-1B-Chat\\",
        "maker/tiny2.5-1b-chat",
        "/home/me/.cache/modelscope/hub/models/maker/Tiny2___5-1B-Chat",
        f"/home/me/.cache/huggingface/hub/models--maker--Tiny2.5-1B-Chat/snapshots/{COMMIT}",
        rf"C:\Users\me\.cache\huggingface\hub\models--maker--Tiny2.5-1B-Chat\snapshots\{COMMIT}",
        f"/hub/models--Tiny2.5-1B-Chat/snapshots/{COMMIT}/",
        "",
    ],
)
def test_spellings_of_one_name(adapter: Path, store: DiskStore, named: ModelSpec, name: str) -> None:
    edit_config(adapter, base_model_name_or_path=name)
    assert store.put(adapter, "acme", "x", named, PushOptions(strict_base=True)).push.warnings == ()


@pytest.mark.parametrize(
    "name",
    [
        "maker/Tiny2.5-1B",
        "Tiny2.5-1B-Chat/other",
        "maker/Tiny2.5-1B-Chat-bnb-4bit",  # a rounded copy: other weights
        f"/hub/models--maker--Other/snapshots/{COMMIT}",
    ],
)
def test_other_names(adapter: Path, store: DiskStore, named: ModelSpec, name: str) -> None:
    edit_config(adapter, base_model_name_or_path=name)
    [warning] = store.put(adapter, "acme", "x", named).push.warnings
    assert warning.reason == "OTHER_BASE_MODEL" and name in warning.message
    with pytest.raises(IncompatibleAdapter, match=r"this base is 'Tiny2\.5-1B-Chat'"):
        store.put(adapter, "acme", "x", named, PushOptions(strict_base=True))


def test_a_base_in_the_cache_of_a_hub(adapter: Path, d0: Path, store: DiskStore, tmp_path: Path) -> None:
    """Its folder is named by a commit, which no adapter's config says."""
    snapshot = tmp_path / "models--maker--Tiny2.5-1B-Chat" / "snapshots" / COMMIT
    spec = ModelSpec.from_folder(shutil.copytree(d0, snapshot))
    assert spec.name == "Tiny2.5-1B-Chat"
    edit_config(adapter, base_model_name_or_path="maker/Tiny2.5-1B-Chat")
    assert store.put(adapter, "acme", "x", spec, PushOptions(strict_base=True)).push.warnings == ()
    edit_config(adapter, base_model_name_or_path="maker/other")
    with pytest.raises(IncompatibleAdapter, match=r"this base is 'Tiny2\.5-1B-Chat'"):
        store.put(adapter, "acme", "x", spec, PushOptions(strict_base=True))


def test_another_base_name_when_strict(
    adapter: Path, store: DiskStore, spec: ModelSpec, tmp_path: Path, leftovers: Callable[[Path], list[str]]
) -> None:
    edit_config(adapter, base_model_name_or_path="acme/other")
    with pytest.raises(IncompatibleAdapter, match="acme/other"):
        store.put(adapter, "default", "x", spec, PushOptions(strict_base=True))
    assert leftovers(tmp_path / "store") == []
