"""Services behind TLS: who has no key gets nothing, and new certificates break no stream."""

import asyncio
import os
import shutil
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import grpc
import pytest

from adapter_store import ModelSpec
from lorafleet import Client, Unavailable
from lorafleet.tls.credentials import channel_credentials
from lorafleet.tls.files import Tls, WatchedFiles
from lorafleet.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from scheduler.fleet.link import ExecutorLink, LinkSettings
from tests.integration.conftest import CALLERS, token_entry
from tests.support.services.certificates import Certificates, make_certificates
from tests.support.services.cluster import PATIENCE_S, Cluster, Pair

NUM_STREAMS = int(os.environ.get("NUM_TLS_STREAMS", "20"))
NUM_TOKENS = int(os.environ.get("NUM_TLS_TOKENS", "200"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """ "front" and "inner" are those of the services, "scheduler" is what executors are shown."""
    made = make_certificates(tmp_path_factory.mktemp("certificates"))
    made.authority.issue("front", ["localhost", "127.0.0.1"], server=True, days=1)
    made.authority.issue("inner", ["localhost", "127.0.0.1"], server=True, days=1)
    made.authority.issue("scheduler", ["scheduler"], server=False, days=1)
    return made


@pytest.fixture(scope="module")
def locked(cluster: Cluster, made: Certificates) -> Iterator[Pair]:
    tokens = cluster.folder / "tls-tokens.toml"
    tokens.write_text(token_entry("ops", *CALLERS["ops"]))
    seats = str(max(32, NUM_STREAMS))
    executor = ("--max-seats", seats, "--num-kv-blocks", "4096", *made.flags("inner", ca="ca"))
    files = (*made.flags("front", ca="ca"), *made.flags("scheduler", prefix="executor", ca="ca"))
    pair = cluster.pair("locked", executor, ("--tokens-file", str(tokens), *files))
    yield pair
    pair.scheduler.stop()
    pair.executor.stop()


# What a client has (certificate, CA), and what its error names.
STRANGERS = {
    "plaintext": (None, "SERVER_SPEAKS_TLS", "speaks TLS"),
    "wrong-ca": (("client", "other"), "UNKNOWN_CA", "not trusted"),
    "no-certificate": ((None, "ca"), "NO_CLIENT_CERTIFICATE", "asks for a certificate"),
    "foreign-certificate": (("foreign-client", "ca"), "CLIENT_CERTIFICATE_REFUSED", "refused"),
    "expired-certificate": (("expired-client", "ca"), "CLIENT_CERTIFICATE_REFUSED", "refused"),
}
# Of servers that are met with the right files: whose certificate they have.
IMPOSTORS = {"expired": ("EXPIRED", "has expired"), "other-name": ("WRONG_NAME", "another name")}


def client_trouble(address: str, tls: Tls | None) -> tuple[str, str]:
    with Client(address, token="ops", tls=tls, timeout=20) as client, pytest.raises(Unavailable) as caught:
        client.models()
    return caught.value.metadata.get("tls", ""), caught.value.message


async def link_trouble(cluster: Cluster, address: str, tls: Tls | None) -> str:
    """What a scheduler says of an executor that it does not get into contact with."""

    class Deaf:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args, **fields: None

    fingerprint = ModelSpec.from_folder(cluster.model).fingerprint
    settings = LinkSettings(fingerprint, tls=WatchedFiles(tls) if tls else None)
    link = ExecutorLink(address, settings, Deaf(), time.monotonic)
    task = asyncio.create_task(link.run())
    async with asyncio.timeout(PATIENCE_S):
        while not link.state.detail.startswith("stream ended"):
            await asyncio.sleep(0.01)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return link.state.detail


@pytest.mark.parametrize("case", STRANGERS)
async def test_strangers_do_not_get_in_and_are_told_why(
    cluster: Cluster, locked: Pair, made: Certificates, case: str
) -> None:
    files, trouble, words = STRANGERS[case]
    tls = made.tls(*files) if files else None
    named, message = await asyncio.to_thread(client_trouble, locked.scheduler.address, tls)
    assert named == trouble and words in message
    assert words in await link_trouble(cluster, locked.executor.address, tls)


@pytest.mark.parametrize("case", IMPOSTORS)
async def test_servers_with_a_wrong_certificate_are_not_believed(
    cluster: Cluster, locked: Pair, made: Certificates, case: str
) -> None:
    trouble, words = IMPOSTORS[case]
    with swapped(made, "front", case), swapped(made, "inner", case):
        named, message = await asyncio.to_thread(client_trouble, locked.scheduler.address, made.tls("client"))
        told = await link_trouble(cluster, locked.executor.address, made.tls("client"))
    assert named == trouble and words in message and words in told


@contextmanager
def swapped(made: Certificates, name: str, other: str) -> Iterator[None]:
    """The files of `name` hold the other certificate meanwhile."""
    for end in ("crt", "key"):
        shutil.copy(made.folder / f"{name}.{end}", made.folder / f"{name}.{end}.kept")
        shutil.copy(made.folder / f"{other}.{end}", made.folder / f"{name}.{end}")
    yield
    for end in ("crt", "key"):
        (made.folder / f"{name}.{end}.kept").replace(made.folder / f"{name}.{end}")


async def test_new_certificates_break_no_stream_and_are_shown_to_the_next(
    locked: Pair, made: Certificates
) -> None:
    """The streams are those of an old client: stubs, a channel of gRPC and the token as metadata."""
    credentials = channel_credentials(made.tls("client"))
    async with grpc.aio.secure_channel(locked.scheduler.address, credentials) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
        streams = [asyncio.create_task(read_all(stub, seed, event)) for seed, event in enumerate(begun)]
        await asyncio.gather(*(event.wait() for event in begun))
        old = [await shown(node.address) for node in (locked.scheduler, locked.executor)]
        for name in ("front", "inner", "scheduler", "client"):
            made.authority.renew(name, 1)
        new = [await shown(node.address) for node in (locked.scheduler, locked.executor)]
        async with grpc.aio.secure_channel(
            locked.scheduler.address, channel_credentials(made.tls("client")), options=APART
        ) as next_channel:
            assert await read_all(inference_pb2_grpc.InferenceStub(next_channel), 0, asyncio.Event(), 5) == 5
        unfinished = sum(not stream.done() for stream in streams)
        assert await asyncio.gather(*streams) == [NUM_TOKENS] * NUM_STREAMS
    assert unfinished > 0
    assert new == [(made.folder / f"{name}.crt").read_text() for name in ("front", "inner")]
    assert old[0] != new[0] and old[1] != new[1]


APART = [("grpc.use_local_subchannel_pool", 1)]


async def read_all(
    stub: inference_pb2_grpc.InferenceStub, seed: int, begun: asyncio.Event, num_tokens: int = NUM_TOKENS
) -> int:
    """The number of its tokens; a stream that breaks raises."""
    stopping = common_pb2.Stopping(max_new_tokens=num_tokens, ignore_eos=True)
    sampling = common_pb2.Sampling(temperature=1.0, seed=seed)
    request = inference_pb2.GenerateRequest(text="The quick", stopping=stopping, sampling=sampling)
    found = 0
    async for chunk in stub.GenerateStream(request, metadata=(("authorization", "Bearer ops"),)):
        found += len(chunk.token_ids)
        begun.set()
    return found


async def shown(address: str) -> str:
    """The certificate that a new connection is shown, which needs none of the client's."""
    host, _, port = address.rpartition(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)), timeout=20)
