"""`python -m adapter_store.convert`: turns an adapter_model.bin into a folder that can be pushed.

Nothing else here ever reads a pickle, and this runs nothing of what one says.
"""

import argparse
import json
import shutil
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from adapter_store.errors import AdapterStoreError, InvalidAdapter
from adapter_store.files.safetensors_file import NUMPY_DTYPES
from adapter_store.peft.folder import WEIGHTS_FILE
from adapter_store.peft.restricted_pickle import read_tensors
from adapter_store.peft.source import KNOWN_FILES

PICKLED_FILE = "adapter_model.bin"


def convert(source: Path, target: Path) -> None:
    """Writes `target`, a new folder: the weights as safetensors, all other known files as they are.

    Raises InvalidAdapter, FileExistsError.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists: name a new folder")
    if not (source / PICKLED_FILE).is_file():
        raise InvalidAdapter(f"{PICKLED_FILE} is missing in {source.name}")
    if (source / WEIGHTS_FILE).exists():
        raise InvalidAdapter(f"{source.name} has {WEIGHTS_FILE} already: push it as it is")
    tensors = read_tensors(source / PICKLED_FILE)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    aside.mkdir(parents=True)
    try:
        for name in KNOWN_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, aside / name)
        with (aside / WEIGHTS_FILE).open("wb") as file:
            _write(tensors, file)
        aside.rename(target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _write(tensors: Mapping[str, NDArray[Any]], file: BinaryIO) -> None:
    names = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        entries[name] = {"dtype": names[array.dtype], "shape": array.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for array in tensors.values():
        file.write(array.reshape(-1).view(np.uint8).data)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m adapter_store.convert", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=f"with {PICKLED_FILE}")
    parser.add_argument("new_folder", type=Path, metavar="NEW_FOLDER", help="is made")
    args = parser.parse_args()
    try:
        convert(args.folder, args.new_folder)
    except (AdapterStoreError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
