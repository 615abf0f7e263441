"""Turns adapter folders into the messages of Push, and those of Pull into files, without a network."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Self

import grpc
from google.protobuf.message import Message

from lorafleet.errors import DataLoss, InvalidRequest, invalid
from lorafleet.foreign import foreign_file
from lorafleet.v1 import adapters_pb2

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all)."""

PIECE_BYTES = 1 << 20
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# What the server may want to see of a folder. Trainers leave far more there, optimizer states for one.
ADAPTER_FILES = (
    CONFIG_FILE,
    WEIGHTS_FILE,
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "generation_config.json",
    "README.md",
)

# Files of some trainers with weights that change answers and that nobody here serves.
UNSERVED_FILES = {
    "non_lora_trainables.bin": "weights that were trained beside the adapter",
    "non_lora_state_dict.bin": "weights that were trained beside the adapter",
    "trainable_params.bin": "fully trained embeddings and norms",
}


def push_messages(folder: Path, first: Message, on_progress: Progress | None) -> Iterator[Message]:
    """The first message as it is, then the files of a PEFT folder in pieces of 1 MiB.

    Raises, before the first message, NotADirectoryError, or InvalidRequest that names the missing file, or
    one with weights that nobody serves.
    """
    paths = _adapter_files(folder)
    return _pieces(paths, first, on_progress)


def _adapter_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is no folder; give the one that PEFT's save_pretrained wrote")
    for required in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / required).is_file():
            raise invalid(required, f"is missing in {folder}{_what_is_there(folder)}")
    for name in UNSERVED_FILES:
        if (folder / name).exists():
            raise unserved(name)
    return [folder / name for name in ADAPTER_FILES if (folder / name).is_file()]


def _what_is_there(folder: Path) -> str:
    """What the caller may have meant, in place of a whole adapter."""
    foreign = foreign_file(path.name for path in folder.iterdir())
    if foreign and not (folder / WEIGHTS_FILE).is_file():
        return f"; {foreign}"
    match adapters_below(folder):
        case []:
            return ""
        case [below]:
            return f"; there is an adapter in {below}: push that folder"
        case several:
            return f"; there are adapters in {few(several)}: push the one that is meant"


def adapters_below(folder: Path) -> list[str]:
    """The folders in `folder`, and in those, that hold an adapter's weights: a trainer's checkpoints."""
    found = (path for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{WEIGHTS_FILE}"))
    return sorted(f"{path.parent.relative_to(folder)}/" for path in found)


def few(names: Sequence[str], most: int = 6) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def unserved(name: str) -> InvalidRequest:
    return invalid(
        name, f"holds {UNSERVED_FILES[name]}, which is not served: the adapter is not whole without"
    )


def left_out(folder: Path) -> list[str]:
    """What a push of this folder does not send, sorted: it has no part in the answers."""
    return sorted(path.name for path in folder.iterdir() if path.name not in ADAPTER_FILES)


def _pieces(paths: list[Path], first: Message, on_progress: Progress | None) -> Iterator[Message]:
    sent, total = 0, sum(path.stat().st_size for path in paths)
    yield first
    for path in paths:
        with path.open("rb") as file:
            data = file.read(PIECE_BYTES)
            while True:  # an empty file is one empty piece: what is wrong with it, the server tells
                yield adapters_pb2.PushRequest(chunk=adapters_pb2.FileChunk(name=path.name, data=data))
                sent += len(data)
                if on_progress is not None:
                    on_progress(sent, total)
                if not (data := file.read(PIECE_BYTES)):
                    break


class Download:
    """Writes the pieces of a Pull beside `folder` and renames the whole into place at `finish`.

    with Download(folder, on_progress) as download:
        for each message: download.write(message)
        download.finish()

    Left without `finish`, nothing stays behind. Raises FileExistsError when `folder` exists and is not empty.
    """

    def __init__(self, folder: Path, on_progress: Progress | None) -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(f"{folder} exists and is not an empty folder; name another one")
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        self._on_progress = on_progress
        self._file: BinaryIO | None = None
        self._name = ""
        self._received = self._total = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()
        shutil.rmtree(self._partial, ignore_errors=True)

    def write(self, message: adapters_pb2.PullResponse) -> None:
        """Raises DataLoss for a file name that would leave the folder."""
        self._total = self._total or message.total_bytes
        if not message.HasField("chunk"):
            return
        if self._file is None or message.chunk.name != self._name:
            self._open(message.chunk.name)
        if self._file is not None:
            self._file.write(message.chunk.data)
        self._received += len(message.chunk.data)
        if self._on_progress is not None:
            self._on_progress(self._received, self._total)

    def finish(self) -> None:
        """Raises DataLoss when bytes are missing."""
        self._close()
        if self._received != self._total or not self._name:
            message = f"the download ended after {self._received} of {self._total} bytes"
            raise DataLoss(grpc.StatusCode.DATA_LOSS, message, reason="DOWNLOAD_INCOMPLETE")
        self._partial.chmod(0o755)  # mkdtemp makes it for its owner only
        os.rename(self._partial, self._folder)

    def _open(self, name: str) -> None:
        self._close()
        if name != os.path.basename(name) or name in ("", ".", ".."):
            message = f"the server sent a file with the name {name!r}"
            raise DataLoss(grpc.StatusCode.DATA_LOSS, message, reason="BAD_FILE_NAME")
        self._name = name
        self._file = (self._partial / name).open("xb")

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
