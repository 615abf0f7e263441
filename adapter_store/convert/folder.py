"""Recognizes an adapter's form by the files in its folder, and writes the folder that PEFT would have."""

import shutil
import uuid
from pathlib import Path

from adapter_store.convert import mistral, mlx
from adapter_store.convert.peft_form import PeftForm
from adapter_store.errors import InvalidAdapter
from adapter_store.peft.config import CONFIG_FILE
from adapter_store.peft.folder import WEIGHTS_FILE
from adapter_store.peft.foreign import foreign_file
from adapter_store.peft.restricted_pickle import read_tensors
from adapter_store.peft.source import KNOWN_FILES, UNSERVED_FILES

PICKLED_FILE = "adapter_model.bin"


def _from_pickle(folder: Path) -> PeftForm:
    """PEFT's own form but for the pickle. Raises InvalidAdapter."""
    return PeftForm(read_tensors(folder / PICKLED_FILE))


# By the file with the weights.
FORMS = {
    PICKLED_FILE: _from_pickle,
    mlx.WEIGHTS_FILE: mlx.from_mlx,
    mistral.WEIGHTS_FILE: mistral.from_mistral,
}


def convert(source: Path, target: Path) -> None:
    """Writes `target`, a new folder: weights and config as PEFT's, all other known files as they are.

    Raises InvalidAdapter, FileExistsError, NotADirectoryError.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists: name a new folder")
    weights = _weights_file(source)
    form = FORMS[weights](source)
    if not form.tensors:
        raise InvalidAdapter(f"{weights} holds no tensors: whoever saved it saved nothing of the adapter")
    made = {WEIGHTS_FILE} if form.config is None else {WEIGHTS_FILE, CONFIG_FILE}
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    aside.mkdir(parents=True)
    try:
        for name in KNOWN_FILES:
            if name not in made and (source / name).is_file():
                shutil.copyfile(source / name, aside / name)
        form.write(aside)
        aside.rename(target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _weights_file(source: Path) -> str:
    """The one file of weights in the folder. Raises InvalidAdapter when there is none, or a choice."""
    names = {path.name for path in source.iterdir()}
    found = [name for name in (WEIGHTS_FILE, *FORMS) if name in names]
    if found == [WEIGHTS_FILE]:
        raise InvalidAdapter(f"{source.name} has {WEIGHTS_FILE} already: push it as it is")
    if len(found) > 1:
        raise InvalidAdapter(
            f"{source.name} has {' and '.join(found)}, of several adapters: keep one of them"
        )
    for name in UNSERVED_FILES:
        if name in names:
            raise InvalidAdapter(f"{name} holds trained weights, which are not served")
    if not found:
        hint = foreign_file(names)
        raise InvalidAdapter(f"{source.name} has none of {', '.join(FORMS)}" + (hint and f"; {hint}"))
    return found[0]
