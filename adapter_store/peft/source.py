"""Takes only known files from a pushed folder, as a private copy: what is checked is what is stored."""

import errno
import shutil
import stat
from dataclasses import replace
from pathlib import Path

from adapter_store.base.end_tokens import GENERATION_FILE
from adapter_store.base.special_tokens import SPECIAL_TOKENS_FILE
from adapter_store.errors import IncompatibleAdapter, InvalidAdapter, WarningsRefused
from adapter_store.files.memory import read_file
from adapter_store.files.safetensors_file import DamagedFile, TensorFile
from adapter_store.manifest import PushOptions, PushWarning
from adapter_store.model_spec import ModelSpec
from adapter_store.peft.config import CONFIG_FILE
from adapter_store.peft.folder import WEIGHTS_FILE, PeftAdapter, open_weights, read_adapter
from adapter_store.peft.tokenizer import (
    ADDED_TOKENS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)

README_FILE = "README.md"
_TEXTS = (
    *(CONFIG_FILE, README_FILE),
    *(TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, GENERATION_FILE),
)
# Only looked at: their ids equal the base's, and they would take megabytes per adapter.
_CHECKED = (TOKENIZER_FILE, ADDED_TOKENS_FILE)
KNOWN_FILES = (WEIGHTS_FILE, *_TEXTS, *_CHECKED)

_MAX_TEXT_BYTES = 16 << 20  # of each that is kept beside the weights: pulls and checks have all in memory
_MAX_FILE_BYTES = 16 << 30  # of each other one
_MOST_CHARS = 1000  # of a warning

# What only writing raises: `private` is on the store's side, and its disk is not the pushed folder's fault.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})

# Of some trainers: weights that change answers and that nobody here serves.
UNSERVED_FILES = ("non_lora_trainables.bin", "non_lora_state_dict.bin", "trainable_params.bin")


def take_adapter(
    source: Path,
    private: Path,
    spec: ModelSpec,
    options: PushOptions,
    max_memory_bytes: int = 0,
) -> PeftAdapter:
    """The way into every store: `source` is copied to `private`, and the copy is checked.

    Weights of at most `max_memory_bytes` are copied to memory instead, in half the time. Raises
    InvalidAdapter, IncompatibleAdapter; OSError where there is no room for the copy.
    """
    file = _copy(source, private, max_memory_bytes)
    adapter = read_adapter(private, spec, strict_base=options.strict_base, file=file)
    _check_ranks(adapter, options.max_rank)
    told = tuple(dict.fromkeys(map(_printable, (*adapter.push.warnings, *options.warnings))))
    if options.strict and told:
        raise WarningsRefused(tuple((each.reason, each.message) for each in told))
    _drop_checked(private)
    return replace(adapter, push=replace(adapter.push, warnings=told))


def _printable(warning: PushWarning) -> PushWarning:
    """It quotes what was pushed, goes with every message about the version, and is shown in terminals."""
    message = warning.message[:_MOST_CHARS] + ("..." if len(warning.message) > _MOST_CHARS else "")
    return replace(warning, message=printable(message))


def printable(text: str) -> str:
    """The text with no halves of characters, and no codes for a terminal."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _copy(source: Path, target: Path, max_memory_bytes: int) -> TensorFile | None:
    """The weights if they are in memory.

    Raises InvalidAdapter for what is missing, too large, a special file, or a link that leads out."""
    try:
        if not source.is_dir():
            raise InvalidAdapter(f"{source.name or source} is not a folder")
        if source.is_symlink() and source.resolve().parent != source.parent.resolve():
            raise InvalidAdapter(f"{source.name} is a link that leads out of its folder")
        for name in UNSERVED_FILES:
            if (source / name).exists():
                raise InvalidAdapter(f"{name} holds trained weights, which are not served")
        files = [file for file in KNOWN_FILES if _is_usable(source, file)]
        target.mkdir()
        weights = None
        if WEIGHTS_FILE in files and (source / WEIGHTS_FILE).stat().st_size <= max_memory_bytes:
            files.remove(WEIGHTS_FILE)
            weights = TensorFile.in_memory(WEIGHTS_FILE, read_file(source / WEIGHTS_FILE))
        else:
            open_weights(source)  # a missing or damaged file is refused before gigabytes are copied
        for file in files:
            shutil.copyfile(source / file, target / file)
        return weights
    except DamagedFile as error:
        raise InvalidAdapter(str(error)) from error
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise
        raise InvalidAdapter(f"the pushed folder cannot be read: {error}") from error


def _check_ranks(adapter: PeftAdapter, max_rank: int | None) -> None:
    for module in adapter.modules:
        if max_rank is not None and module.rank > max_rank:
            raise IncompatibleAdapter(
                f"{module.name} has rank {module.rank}, adapters of rank {max_rank} at most are taken"
            )


def _drop_checked(folder: Path) -> None:
    for file in _CHECKED:
        (folder / file).unlink(missing_ok=True)


def _is_usable(source: Path, name: str) -> bool:
    path = source / name
    if not path.exists() and not path.is_symlink():
        return False
    if not path.resolve(strict=True).is_relative_to(source.resolve()):
        raise InvalidAdapter(f"{name} is a link that leads out of the adapter's folder")
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise InvalidAdapter(f"{name} is not a regular file")
    max_bytes = _MAX_TEXT_BYTES if name in _TEXTS else _MAX_FILE_BYTES
    if status.st_size > max_bytes:
        raise InvalidAdapter(f"{name} has {status.st_size} bytes, at most {max_bytes} are taken")
    return True
