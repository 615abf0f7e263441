"""The files of a push on their way into a spool folder, and those of a pull on their way out."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import IO

import grpc

from adapter_store import PushWarning
from lorafleet.v1 import adapters_pb2
from scheduler.errors import DeadlineExceeded, InvalidRequest, StoreUnavailable

logger = logging.getLogger(__name__)

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
# A client that sends, or reads, nothing for so long gives its place up.
STALL_LIMIT_S = 60.0
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


async def receive_header(parts: AsyncIterator[adapters_pb2.PushRequest]) -> adapters_pb2.PushHeader:
    """The first message of a push. Raises InvalidRequest, DeadlineExceeded."""
    first = await anext(_without_stalls(parts, HEADER_LIMIT_S), None)
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
    parts: AsyncIterator[adapters_pb2.PushRequest], folder: Path, max_bytes: int, pool: Executor
) -> None:
    """Writes all other messages' pieces into `folder`, `max_bytes` at most. Raises InvalidRequest.

    Names are only ever compared with a list, so none is a path.
    """
    loop = asyncio.get_running_loop()
    total = 0
    file: IO[bytes] | None = None
    try:
        async for part in _without_stalls(parts, STALL_LIMIT_S):
            chunk = _checked_chunk(part)
            total += len(chunk.data)
            if total > max_bytes:
                raise InvalidRequest("chunk.data", f"the push has more than {max_bytes} bytes")
            if file is None or Path(file.name).name != chunk.name:
                if file is not None:
                    file.close()
                file = _create(folder, chunk.name)
            await loop.run_in_executor(pool, file.write, chunk.data)
    finally:
        if file is not None:
            file.close()
    if file is None:
        raise InvalidRequest("chunk", "is missing: a push needs files")


async def _without_stalls(
    parts: AsyncIterator[adapters_pb2.PushRequest], limit_s: float
) -> AsyncIterator[adapters_pb2.PushRequest]:
    while True:
        try:
            async with asyncio.timeout(limit_s):
                part = await anext(parts)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise DeadlineExceeded(f"the upload stood still for {limit_s:g} s") from None
        yield part


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


async def send_piece(context: grpc.aio.ServicerContext, piece: adapters_pb2.PullResponse) -> None:
    """Waits for a client that does not read, but not for ever. Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout(STALL_LIMIT_S):
            await context.write(piece)
    except TimeoutError:
        raise DeadlineExceeded(f"the download stood still for {STALL_LIMIT_S:g} s") from None


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
