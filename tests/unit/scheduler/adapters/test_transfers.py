"""Files on their way through the Adapters service: what is refused, and what stays of one that never ends."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from lorafleet.v1 import adapters_pb2 as pb
from lorafleet.v1 import adapters_pb2_grpc
from scheduler.adapters import transfer
from scheduler.adapters.transfer import Patience
from scheduler.errors import SlowTransfer
from tests.support.services.adapters_calls import Running, as_, push, read_all, refused
from tests.support.stores.small_disk import files_of_at_most

pytestmark = pytest.mark.asyncio(loop_scope="module")


BAD_NAMES = [
    "../adapter_config.json",
    "/etc/x",
    "a/b",
    "..",
    "",
    "adapter_model.bin",
    "x\0",
    "README.MD",
    "é" * 300,
]


@pytest.mark.parametrize("name", BAD_NAMES)
async def test_only_listed_file_names_are_taken(service: Running, name: str) -> None:
    error = await refused(push(service, "names", service.content(5) | {name: b"x"}))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "chunk.name" in error.details()
    assert list(service.spool.iterdir()) == []


def header(**fields: Any) -> pb.PushRequest:
    return pb.PushRequest(header=pb.PushHeader(**fields))


def chunk(name: str, data: bytes = b"{}") -> pb.PushRequest:
    return pb.PushRequest(chunk=pb.FileChunk(name=name, data=data))


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "header"),
        ([chunk("README.md")], "header"),
        ([header(adapter="x")], "chunk"),
        ([header(adapter="x"), header(adapter="x")], "chunk"),
        ([header(adapter="x"), chunk("README.md"), header(adapter="x")], "chunk"),
        (
            [header(adapter="x"), chunk("README.md"), chunk("adapter_config.json"), chunk("README.md")],
            "chunk.name",
        ),
        ([header(adapter="x"), chunk("README.md", b"x" * (4 * 1024 * 1024 + 1))], "chunk.data"),
        ([header(adapter="x"), *[chunk("README.md", b"x" * 100_000)] * 3], "chunk.data"),
        ([header(adapter="x@latest")], "header.adapter"),
        ([header(adapter="X")], "header.adapter"),
        ([header(adapter="../x")], "header.adapter"),
        ([header(adapter="x", alias="No")], "header.alias"),
        ([header(adapter="x", alias="sha256:" + "0" * 64)], "header.alias"),
        ([header(adapter="x", alias="", expected_generation=1)], "header.expected_generation"),
        ([header(adapter="x"), chunk("README.md")], "is missing"),
    ],
)
async def test_a_malformed_push_is_refused_and_leaves_nothing(
    service: Running, messages: Sequence[pb.PushRequest], named: str
) -> None:
    error = await refused(service.stub.Push(iter(messages), **as_("acme")))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert named in error.details()
    assert list(service.spool.iterdir()) == []


async def test_damaged_weights_are_named_and_nothing_stays(service: Running) -> None:
    files = service.content(6)
    weights = files["adapter_model.safetensors"]
    for damaged in (b"", weights[: len(weights) // 2], weights + b"x", b"\xff" * 64):
        error = await refused(push(service, "damaged", files | {"adapter_model.safetensors": damaged}))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "adapter_model.safetensors" in error.details()
    listed = await service.stub.List(pb.ListAdaptersRequest(name="damaged"), **as_("acme"))
    assert len(listed.versions) == 0


async def test_a_download_that_nobody_reads_gives_its_place_up(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PULL_CHUNK_BYTES", 4096)
    monkeypatch.setattr(transfer, "STALL_LIMIT_S", 2.0)  # it holds its place until another has asked
    await push(service, "long", service.content(60, chat_template="x" * 200_000))
    options = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}", options=options) as channel:
        stuck = adapters_pb2_grpc.AdaptersStub(channel).Pull(pb.PullRequest(adapter="long"), **as_("acme"))
        await stuck.read()
        busy = await refused(read_all(service.stub.Pull(pb.PullRequest(adapter="long"), **as_("acme"))))
        assert busy.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        async with asyncio.timeout(60):
            while list(service.spool.iterdir()):
                await asyncio.sleep(0.05)
        assert await read_all(service.stub.Pull(pb.PullRequest(adapter="long"), **as_("acme")))
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await stuck.read() is not grpc.aio.EOF:
                pass
        assert await stuck.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_push_that_never_says_what_it_is_gives_its_turn_up(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are few turns, and it took one before anybody knew whether its sender may push."""
    monkeypatch.setattr(transfer, "HEADER_LIMIT_S", 0.1)
    silent = service.stub.Push(**as_("acme"))
    assert (await refused(silent)).code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await refused(service.stub.Push(iter(()), **as_("acme")))).code() == (
        grpc.StatusCode.INVALID_ARGUMENT
    )


async def test_a_push_that_brings_too_little_ends_and_holds_up_no_other_tenant(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then is no standstill, and yet keeps a place."""
    monkeypatch.setattr(transfer, "STALL_LIMIT_S", 1.0)
    slow = service.stub.Push(**as_("acme"))
    await slow.write(header(adapter="slow"))

    async def drip() -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while not slow.done():
                await slow.write(chunk("README.md", b"x"))
                await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    while not any(service.spool.iterdir()):
        await asyncio.sleep(0.01)
    busy = await refused(push(service, "own", service.content(50)))
    assert (busy.code(), reason(busy)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_TRANSFERS")
    for number in range(3):
        assert await push(service, f"another-{number}", service.content(51), who="rival")
    ended = await refused(slow)
    await dripping
    assert (ended.code(), reason(ended)) == (grpc.StatusCode.DEADLINE_EXCEEDED, "SLOW_TRANSFER")


def reason(error: grpc.aio.AioRpcError) -> str:
    status, info = rpc_status.from_call(error), error_details_pb2.ErrorInfo()
    assert status is not None and status.details[0].Unpack(info)
    return info.reason


async def test_a_push_is_held_to_what_it_brings_not_to_what_we_take_to_write_it() -> None:
    now = [0.0]
    patience = Patience(lambda: now[0])

    async def brings(num_bytes: int, after_s: float) -> None:
        now[0] += after_s
        patience.moved(num_bytes)

    for _ in range(20):
        await patience.wait(brings(1 << 20, 50.0))
        now[0] += 100.0  # Of our disk.
    with pytest.raises(SlowTransfer):
        for _ in range(20):
            await patience.wait(brings(1, 5.0))
    patience = Patience(lambda: now[0])
    with pytest.raises(SlowTransfer):
        for _ in range(100):
            await patience.wait(brings(1 << 20, 50.0))


async def test_a_full_disk_under_uploads_and_downloads_is_unavailable(service: Running) -> None:
    files = service.content(70)
    await push(service, "kept", files)
    with files_of_at_most(100):
        pushing = await refused(push(service, "other", files))
        pulling = await refused(read_all(service.stub.Pull(pb.PullRequest(adapter="kept"), **as_("acme"))))
    for error in (pushing, pulling):
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "File too large" in error.details() and str(service.spool) not in error.details()
    assert list(service.spool.iterdir()) == []


async def test_a_cancelled_upload_frees_its_folder_and_its_place(service: Running) -> None:
    call = service.stub.Push(**as_("acme"))
    await call.write(header(adapter="half"))
    await call.write(chunk("README.md"))
    while not any(service.spool.iterdir()):
        await service.stub.List(pb.ListAdaptersRequest(), **as_("acme"))
    busy = await refused(push(service, "other", service.content(50)))
    assert busy.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    call.cancel()
    while any(service.spool.iterdir()):
        await service.stub.List(pb.ListAdaptersRequest(), **as_("acme"))
    assert (await push(service, "other", service.content(50))).created


async def test_a_push_that_comes_slowly_is_not_there_before_its_end(service: Running) -> None:
    """The config, then the weights in two halves."""
    files = service.content(60)
    call = service.stub.Push(**as_("acme"))
    await call.write(header(adapter="slow"))
    (weights,) = [name for name in files if name.endswith(".safetensors")]
    half = len(files[weights]) // 2
    await call.write(chunk("adapter_config.json", files["adapter_config.json"]))
    for part in (files[weights][:half], files[weights][half:]):
        while not any(service.spool.iterdir()):
            await asyncio.sleep(0.01)
        missing = await refused(service.stub.Get(pb.GetAdapterRequest(adapter="slow"), **as_("acme")))
        assert missing.code() == grpc.StatusCode.NOT_FOUND
        assert not (await service.stub.List(pb.ListAdaptersRequest(name="slow"), **as_("acme"))).versions
        await call.write(chunk(weights, part))
    await call.done_writing()
    pushed = (await call).version
    assert (await service.stub.Get(pb.GetAdapterRequest(adapter="slow"), **as_("acme"))).version == pushed
