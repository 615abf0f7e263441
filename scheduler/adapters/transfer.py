"""The files of a push on their way into a spool folder, and those of a pull on their way out."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import IO, TypeVar

import grpc

from adapter_store import PushWarning
from lorafleet.v1 import adapters_pb2
from scheduler.adapters.spool import Place
from scheduler.errors import InvalidRequest, SlowTransfer, StoreUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Weights, and small texts. Pickles (*.bin) are not on the list: they run code.
ACCEPTED_FILES = frozenset(
    {
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
        "added_tokens.json",
        "README.md",
    }
)
_SINCE = "generation_config.json"  # the last that joined the list
MAX_CHUNK_BYTES = 4 * 1024 * 1024
PULL_CHUNK_BYTES = 1024 * 1024
# A client is waited for so long in a row, and in the mean for a second with each so many bytes.
STALL_LIMIT_S = 60.0
LEAST_BYTES_PER_S = 8 * 1024
TRANSFER_LIMIT_S = 3600.0
# It comes with its call, and until then nobody knows whether its sender may push at all.
HEADER_LIMIT_S = 10.0


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Around work in a spool folder: a full disk is no bug. Only the log names the path."""
    try:
        yield
    except OSError as error:
        logger.error("the folder of pushes and pulls under way failed: %s", error)
        raise StoreUnavailable(f"the scheduler's own disk failed: {error.strerror or error}") from error


class Patience:
    """The patience for one client, on a clock that stands still while this process does. A client that is
    slower than LEAST_BYTES_PER_S runs it down; time that goes into our own disk is none of the client's."""

    def __init__(self, awake: Callable[[], float]) -> None:
        self._awake = awake
        self._left_s = STALL_LIMIT_S
        self._ends = awake() + TRANSFER_LIMIT_S

    async def wait(self, client: Awaitable[T], limit_s: float | None = None) -> T:
        """What `client` brings, in `limit_s` at most where that is less. Raises SlowTransfer."""
        began = self._awake()
        until = min(began + min(self._left_s, limit_s or self._left_s), self._ends)
        waiting = asyncio.ensure_future(client)
        try:
            while not waiting.done():
                if (left_s := until - self._awake()) <= 0:
                    raise SlowTransfer(
                        f"the transfer stood still for too long, or is slower than {LEAST_BYTES_PER_S} bytes "
                        f"a second, or takes longer than {TRANSFER_LIMIT_S:g} s"
                    )
                await asyncio.wait([waiting], timeout=left_s)
            return waiting.result()
        finally:
            self._left_s -= self._awake() - began
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait([waiting])

    def moved(self, num_bytes: int) -> None:
        self._left_s = min(STALL_LIMIT_S, self._left_s + num_bytes / LEAST_BYTES_PER_S)


async def receive_header(
    parts: AsyncIterator[adapters_pb2.PushRequest], patience: Patience
) -> adapters_pb2.PushHeader:
    """The first message of a push. Raises InvalidRequest, SlowTransfer."""
    first = await patience.wait(anext(parts, None), HEADER_LIMIT_S)
    if first is not None and first.HasField("header"):
        return first.header
    raise InvalidRequest("header", "must be the first message")


def not_looked_for(header: adapters_pb2.PushHeader, folder: Path) -> tuple[PushWarning, ...]:
    """What an older client does not send, of what would change answers."""
    if _SINCE in header.looked_for or (folder / _SINCE).exists():
        return ()
    text = f"{_SINCE} is not looked for by this client: if the folder has one, its end tokens are not known"
    return (PushWarning("FILE_NOT_LOOKED_FOR", text),)


async def receive_files(
    parts: AsyncIterator[adapters_pb2.PushRequest],
    place: Place,
    max_bytes: int,
    pool: Executor,
    patience: Patience,
) -> None:
    """Writes all other messages' pieces into the place, `max_bytes` at most. Raises InvalidRequest,
    SlowTransfer, TooMuchHeld.

    Names are only ever compared with a list, so none is a path.
    """
    loop = asyncio.get_running_loop()
    total = 0
    file: IO[bytes] | None = None
    try:
        while (part := await patience.wait(anext(parts, None))) is not None:
            chunk = _checked_chunk(part)
            total += len(chunk.data)
            if total > max_bytes:
                raise InvalidRequest("chunk.data", f"the push has more than {max_bytes} bytes")
            place.take(len(chunk.data))
            patience.moved(len(chunk.data))
            if file is None or Path(file.name).name != chunk.name:
                if file is not None:
                    file.close()
                file = _create(place.folder, chunk.name)
            await loop.run_in_executor(pool, file.write, chunk.data)
    finally:
        if file is not None:
            file.close()
    if file is None:
        raise InvalidRequest("chunk", "is missing: a push needs files")


def _checked_chunk(part: adapters_pb2.PushRequest) -> adapters_pb2.FileChunk:
    if not part.HasField("chunk"):
        raise InvalidRequest("chunk", "is missing: after the header come pieces of files only")
    chunk = part.chunk
    if chunk.name not in ACCEPTED_FILES:
        raise InvalidRequest(
            "chunk.name", f"{chunk.name[:80]!r} is not taken; send only {', '.join(sorted(ACCEPTED_FILES))}"
        )
    if len(chunk.data) > MAX_CHUNK_BYTES:
        raise InvalidRequest("chunk.data", f"has {len(chunk.data)} bytes, at most {MAX_CHUNK_BYTES} a piece")
    return chunk


def _create(folder: Path, name: str) -> IO[bytes]:
    try:
        return (folder / name).open("xb")
    except FileExistsError:
        raise InvalidRequest("chunk.name", f"the pieces of {name} do not come in one row") from None


async def send_piece(
    context: grpc.aio.ServicerContext, piece: adapters_pb2.PullResponse, patience: Patience
) -> None:
    """Waits for a client that does not read, but not for ever. Raises SlowTransfer."""
    await patience.wait(context.write(piece))
    patience.moved(len(piece.chunk.data))


def read_files(folder: Path) -> Iterator[adapters_pb2.PullResponse]:
    """All files of the folder, piece by piece; an empty file is one empty piece."""
    files = sorted(folder.iterdir())
    total = sum(file.stat().st_size for file in files)
    for file in files:
        with file.open("rb") as source:
            data = source.read(PULL_CHUNK_BYTES)
            while True:
                yield adapters_pb2.PullResponse(
                    chunk=adapters_pb2.FileChunk(name=file.name, data=data), total_bytes=total
                )
                total = 0
                if not (data := source.read(PULL_CHUNK_BYTES)):
                    break
