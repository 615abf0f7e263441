"""Reads tensors from a file of torch.save, without torch and without running what the file names.

Since torch 1.6 such a file is a zip archive: `<name>/data.pkl` is a pickle of the objects, in which each
tensor is a call of a rebuilding function with a storage, and `<name>/data/<key>` are the storages' bytes. Of
all that a pickle can call, a few names are known here and are ours; any other one is refused before it is
looked up.
"""

import collections
import math
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from adapter_store.errors import InvalidAdapter
from adapter_store.files.lfs_pointer import WHAT_IT_IS, is_pointer_file

MAX_PICKLE_BYTES = 64 << 20
_STORAGES: Mapping[str, np.dtype[Any]] = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: np.dtype[Any]


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors by name, each contiguous. Raises InvalidAdapter for anything but a flat dictionary of float
    tensors."""
    if is_pointer_file(path):
        raise InvalidAdapter(f"{path.name} is {WHAT_IT_IS}")
    try:
        with zipfile.ZipFile(path) as archive:
            root = _root(archive, path.name)
            entry = archive.getinfo(f"{root}/data.pkl")
            if entry.file_size > MAX_PICKLE_BYTES:
                raise InvalidAdapter(f"{path.name} holds a pickle of {entry.file_size} bytes")
            with archive.open(entry) as data:
                loaded = _Unpickler(data, archive, root, path.name).load()
    except zipfile.BadZipFile as error:
        raise InvalidAdapter(
            f"{path.name} is damaged, or was written by a torch before 1.6: save it again ({error})"
        ) from error
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, IndexError) as error:
        raise InvalidAdapter(f"{path.name} holds no dictionary of tensors: {error!r}") from error
    if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
        raise InvalidAdapter(f"{path.name} holds no dictionary of tensors")
    for name, value in loaded.items():
        if not isinstance(value, np.ndarray):
            raise InvalidAdapter(f"{path.name}: {name[:200]!r} is no tensor")
    return dict(loaded)


def _root(archive: zipfile.ZipFile, file: str) -> str:
    """The folder that everything is in. Raises InvalidAdapter."""
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise InvalidAdapter(f"{file} is compressed, as torch.save never writes it")
    pickles = [entry.filename for entry in entries if entry.filename.count("/") == 1]
    roots = {name.partition("/")[0] for name in pickles if name.endswith("/data.pkl")}
    if len(roots) != 1:
        raise InvalidAdapter(f"{file} is no file of torch.save")
    [root] = roots
    if f"{root}/byteorder" in archive.namelist() and archive.read(f"{root}/byteorder") != b"little":
        raise InvalidAdapter(f"{file} was written on a big-endian machine: save it again")
    return root


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: Any, archive: zipfile.ZipFile, root: str, file: str) -> None:
        super().__init__(data)
        self._archive, self._root, self._file = archive, root, file
        self._storages: dict[str, NDArray[Any]] = {}
        # Of tensors: a few may share their storage.
        self._bytes_left = 2 * sum(entry.file_size for entry in archive.infolist())

    def find_class(self, module: str, name: str) -> Any:
        known: Mapping[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): self._rebuild_tensor,
            ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
        }
        if (module, name) in known:
            return known[module, name]
        if module == "torch" and name in _STORAGES:
            return _StorageType(_STORAGES[name])
        raise InvalidAdapter(f"{self._file} wants to call {module}.{name}, which is never done")

    def persistent_load(self, pid: Any) -> NDArray[Any]:
        kind, storage, key, _, numel = pid
        if kind != "storage" or not isinstance(storage, _StorageType) or not str(key).isalnum():
            raise InvalidAdapter(f"{self._file} holds a storage of no known kind")
        if key not in self._storages:
            data = self._archive.read(f"{self._root}/data/{key}")
            if len(data) != numel * storage.dtype.itemsize:
                raise InvalidAdapter(
                    f"{self._file}: storage {key} has {len(data)} bytes for {numel} elements"
                )
            self._storages[key] = np.frombuffer(data, storage.dtype)
        return self._storages[key]

    def _rebuild_tensor(
        self,
        storage: NDArray[Any],
        offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        *_: object,
    ) -> NDArray[Any]:
        numbers = (offset, *size, *stride)
        if len(size) != len(stride) or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError("a tensor has an impossible shape")
        self._bytes_left -= math.prod(size) * storage.itemsize
        if self._bytes_left < 0:
            raise ValueError("the tensors are larger than the file")
        if 0 in size:
            return np.empty(size, storage.dtype)
        if offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) >= len(storage):
            raise ValueError("a tensor reaches beyond its storage")
        steps = [step * storage.itemsize for step in stride]
        view = np.lib.stride_tricks.as_strided(storage[offset:], size, steps, writeable=False)
        return np.ascontiguousarray(view)


def _rebuild_parameter(data: NDArray[Any], *_: object) -> NDArray[Any]:
    return data
