"""Which files a base model's weights are in, and what is in each of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adapter_store.base.fields import Fields
from adapter_store.errors import InvalidModel
from adapter_store.files.safetensors_file import DamagedFile, TensorInfo, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """A tensor of the checkpoint, under the name that its file has for it."""

    file: Path
    dtype: str  # as safetensors writes it: "BF16"
    shape: tuple[int, ...]


def has_checkpoint(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))


def read_tensors(folder: Path) -> Mapping[str, BaseTensor]:
    """Every tensor of the checkpoint by its name, from the headers of its files.

    As in transformers, model.safetensors wins over an index, which may be left over from other weights.
    Raises InvalidModel, naming the file, when there is neither, or an index and its files disagree.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return _tensors(single)
    if not index.is_file():
        raise InvalidModel(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    homes = _read_index(index)
    tensors: dict[str, BaseTensor] = {}
    for file in sorted(set(homes.values())):
        found = _tensors(file)
        if here := sorted({name for name, home in homes.items() if home == file} ^ found.keys()):
            raise InvalidModel(f"{index} and {file} disagree about {here[0]}")
        tensors |= found
    return tensors


def _read_index(index: Path) -> dict[str, Path]:
    weight_map = Fields.from_file(index).values.get("weight_map")
    if not isinstance(weight_map, dict):
        raise InvalidModel(f"cannot read weight_map of {index}: it is no object")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise InvalidModel(f"{index}: {name} points at {file!r}, which is not a plain file name")
    return {name: index.parent / file for name, file in weight_map.items()}


def _tensors(file: Path) -> dict[str, BaseTensor]:
    try:
        infos: list[TensorInfo] = list(read_header(file).tensors.values())
    except (OSError, DamagedFile) as error:
        raise InvalidModel(f"cannot read {file}: {error}") from error
    return {info.name: BaseTensor(file, info.dtype, info.shape) for info in infos}
