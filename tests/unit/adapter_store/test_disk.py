"""What only the store in a folder does."""

from pathlib import Path

import pytest
from safetensors import safe_open

from adapter_store import DiskStore, InvalidRef, ModelSpec, Ref, StoreUnavailable, open_store


def test_the_packed_file_is_plain_safetensors(tmp_path: Path, adapters: list[Path], spec: ModelSpec) -> None:
    version = DiskStore(tmp_path / "store").put(adapters[0], "acme", "x", spec)
    blob = tmp_path / "store" / "blobs" / version.digest.removeprefix("sha256:")
    with safe_open(blob / "packed.safetensors", "np") as file:
        assert sorted(file.keys()) == ["layers.0.q_proj.lora_a", "layers.0.q_proj.lora_b"]
        assert file.metadata()["modules"] == '[["layers.0.q_proj", 4, 2.0]]'
    assert (blob / "packed.safetensors").stat().st_size == version.manifest.num_bytes


@pytest.mark.parametrize("prefix", ["", "disk:"])
def test_open_store(prefix: str, tmp_path: Path, adapters: list[Path], spec: ModelSpec) -> None:
    store = open_store(f"{prefix}{tmp_path / 'deep' / 'store'}")
    assert store.put(adapters[0], "acme", "x", spec) == store.resolve(Ref.parse("acme/x", ""))


@pytest.mark.parametrize("url", ["", "disk:", "s3://bucket"])
def test_unknown_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidRef, match="store url"):
        open_store(url)


def test_a_store_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable):
        DiskStore(tmp_path / "file" / "store")
