"""A clone without Git LFS has pointers in place of files: each is told so, whoever reads it."""

import shutil
from pathlib import Path

import pytest

from adapter_store import DiskStore, InvalidAdapter, InvalidModel, ModelSpec
from adapter_store.convert.folder import convert
from adapter_store.files.lfs_pointer import is_pointer

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 167832240\n" % (b"a" * 64)


@pytest.mark.parametrize(
    "name",
    [
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
        "added_tokens.json",
        "chat_template.jinja",  # which would be a template for all that it is
    ],
)
def test_in_a_pushed_folder(adapter: Path, d0: Path, tmp_path: Path, store: DiskStore, name: str) -> None:
    base = shutil.copytree(d0, tmp_path / "base")
    (base / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    (adapter / name).write_bytes(POINTER)
    with pytest.raises(InvalidAdapter, match=f"{name}.* is a Git LFS pointer"):
        store.put(adapter, "acme", "x", ModelSpec.from_folder(base))


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapters.safetensors", "lora.safetensors"])
def test_in_a_folder_to_convert(adapter: Path, name: str) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_config.json").write_text('{"lora_parameters": {"rank": 4, "scale": 2.0}}')
    (adapter / "params.json").write_text('{"lora": {"rank": 4, "scaling": 2.0}}')
    (adapter / name).write_bytes(POINTER)
    with pytest.raises(InvalidAdapter, match=f"{name} is a Git LFS pointer"):
        convert(adapter, adapter.parent / "converted")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_in_a_base_folder(d0: Path, tmp_path: Path, name: str) -> None:
    base = shutil.copytree(d0, tmp_path / "base")
    (base / name).write_bytes(POINTER)
    with pytest.raises(InvalidModel, match=f"{name}.* is a Git LFS pointer"):
        ModelSpec.from_folder(base)


def test_what_is_none() -> None:
    assert is_pointer(POINTER[:8]) and is_pointer(POINTER)
    assert not any(map(is_pointer, (b"", b"version", b"version 2 of it", POINTER[1:])))
