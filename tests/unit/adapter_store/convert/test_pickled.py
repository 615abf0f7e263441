"""adapter_model.bin becomes safetensors, and whatever else a pickle may hold runs nothing."""

import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from adapter_store import DiskStore, InvalidAdapter, ModelSpec
from adapter_store.convert.folder import convert
from tests.support.adapters.peft import read_tensors


def pickled(adapter: Path, **tensors: object) -> Path:
    """The adapter with its weights in a pickle; `tensors` are more entries of it."""
    weights = read_tensors(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(OrderedDict(weights, **tensors), adapter / "adapter_model.bin")
    return adapter


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_torch_saved(adapter: Path, store: DiskStore, spec: ModelSpec, dtype: torch.dtype) -> None:
    whole = {name: t.to(dtype) for name, t in read_tensors(adapter).items()}
    name, tensor = next(iter(whole.items()))
    wide = torch.cat([tensor, tensor])
    odd = {name: wide[len(tensor) :].T.contiguous().T}  # a view with an offset and foreign strides
    pickled(adapter)
    torch.save({**whole, **odd}, adapter / "adapter_model.bin")
    target = adapter.parent / "converted"
    convert(adapter, target)
    found = read_tensors(target)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    assert (target / "adapter_config.json").read_bytes() == (adapter / "adapter_config.json").read_bytes()
    assert store.put(target, "acme", "x", spec).manifest.dtypes
    with pytest.raises(FileExistsError):
        convert(adapter, target)


def test_parameters_are_tensors(adapter: Path) -> None:
    pickled(adapter, extra=torch.nn.Parameter(torch.ones(3)))
    convert(adapter, adapter.parent / "converted")
    assert torch.equal(read_tensors(adapter.parent / "converted")["extra"], torch.ones(3))


def test_a_file_of_nothing(adapter: Path) -> None:
    """Some scripts saved the empty rest of what PEFT had filtered before."""
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({}, adapter / "adapter_model.bin")
    with pytest.raises(InvalidAdapter, match=r"adapter_model\.bin holds no tensors"):
        convert(adapter, adapter.parent / "converted")
    assert not (adapter.parent / "converted").exists()


class Touch:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, (f"touch {self.marker}",))


def refused(adapter: Path, complaint: str) -> None:
    target = adapter.parent / "converted"
    with pytest.raises(InvalidAdapter, match=complaint):
        convert(adapter, target)
    assert not target.exists() and list(adapter.parent.glob(".converted*")) == []


def test_nothing_that_a_pickle_names_is_called(adapter: Path) -> None:
    marker = adapter.parent / "marker"
    pickled(adapter, evil=Touch(marker))
    refused(adapter, "wants to call posix.system")
    assert not marker.exists()


@pytest.mark.parametrize("value", [1, "text", [torch.ones(2)], {"nested": torch.ones(2)}], ids=repr)
def test_only_tensors(adapter: Path, value: object) -> None:
    pickled(adapter, other=value)
    refused(adapter, "'other' is no tensor")


@pytest.mark.parametrize("tensor", [torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.float64)])
def test_only_floats_that_adapters_have(adapter: Path, tensor: torch.Tensor) -> None:
    pickled(adapter, other=tensor)
    refused(adapter, "never done")


@pytest.mark.parametrize(
    "content", [b"", b"no zip", pickle.dumps({"a": 1}), b"version https://git-lfs.github"]
)
def test_files_that_torch_did_not_save(adapter: Path, content: bytes) -> None:
    pickled(adapter)
    (adapter / "adapter_model.bin").write_bytes(content)
    refused(adapter, "adapter_model.bin is")


def rezipped(adapter: Path, compression: int, **changes: bytes) -> None:
    """The same archive with other entries, by the last part of their names."""
    file = adapter / "adapter_model.bin"
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, changes.get(name.rpartition("/")[2].replace(".", "_"), data))


def test_a_bomb(adapter: Path) -> None:
    pickled(adapter)
    rezipped(adapter, zipfile.ZIP_DEFLATED)
    refused(adapter, "is compressed")


def test_tensors_beyond_their_storage(adapter: Path) -> None:
    pickled(adapter)
    rezipped(adapter, zipfile.ZIP_STORED, **{"0": b"1234"})
    refused(adapter, "storage 0 has 4 bytes")


def test_a_pickle_that_is_cut_short(adapter: Path) -> None:
    pickled(adapter)
    rezipped(adapter, zipfile.ZIP_STORED, data_pkl=b"\x80\x02}")
    refused(adapter, "no dictionary")


def test_the_command(adapter: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "adapter_store.convert", str(adapter)]
    failed = subprocess.run([*command, str(tmp_path / "new")], capture_output=True, text=True, check=False)
    assert (
        failed.returncode == 1 and "has adapter_model.safetensors already: push it as it is" in failed.stderr
    )
    pickled(adapter)
    subprocess.run([*command, str(tmp_path / "new")], check=True)
    assert read_tensors(tmp_path / "new")
