"""Services behind TLS: who has no key gets nothing, and is told why."""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from adapter_store import ModelSpec
from lorafleet import Client, Unavailable
from lorafleet.tls.expiry import ends
from lorafleet.tls.files import Tls, WatchedFiles
from scheduler.fleet.endpoint import Endpoint
from scheduler.fleet.link import ExecutorLink, LinkSettings
from tests.integration.conftest import CALLERS, token_entry
from tests.support.services.certificates import Certificates, make_certificates
from tests.support.services.cluster import PATIENCE_S, Cluster, Pair


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """The services show "front" and "inner", and "scheduler" is what executors are shown."""
    made = make_certificates(tmp_path_factory.mktemp("certificates"))
    made.authority.issue("front", ["localhost", "127.0.0.1"], server=True, days=1)
    made.authority.issue("inner", ["localhost", "127.0.0.1"], server=True, days=1)
    made.authority.issue("scheduler", ["scheduler"], server=False, days=1)
    return made


@pytest.fixture(scope="module")
def locked(cluster: Cluster, made: Certificates) -> Iterator[Pair]:
    tokens = cluster.folder / "tls-tokens.toml"
    tokens.write_text(token_entry("ops", *CALLERS["ops"]))
    executor = made.flags("inner", ca="ca")
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
    link = ExecutorLink(Endpoint(address), settings, Deaf(), time.monotonic)
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


def test_the_metrics_tell_when_certificates_end(locked: Pair, made: Certificates) -> None:
    ours = {"tls-cert-file": "front", "tls-client-ca-file": "ca"}
    for node, files in (
        (locked.scheduler, {**ours, "executor-cert-file": "scheduler", "executor-ca-file": "ca"}),
        (locked.executor, {**ours, "tls-cert-file": "inner"}),
    ):
        name = f"lorafleet_{node.module}_certificate_expiry_timestamp_seconds"
        told = {key: value for key, value in node.metrics().items() if key.startswith(name)}
        expected = {flag: ends((made.folder / f"{file}.crt").read_bytes()) for flag, file in files.items()}
        assert told == {f"{name}{{file={flag}}}": end for flag, (end,) in expected.items()}


@contextmanager
def swapped(made: Certificates, name: str, other: str) -> Iterator[None]:
    """The files of `name` hold the other certificate meanwhile."""
    for end in ("crt", "key"):
        shutil.copy(made.folder / f"{name}.{end}", made.folder / f"{name}.{end}.kept")
        shutil.copy(made.folder / f"{other}.{end}", made.folder / f"{name}.{end}")
    yield
    for end in ("crt", "key"):
        (made.folder / f"{name}.{end}.kept").replace(made.folder / f"{name}.{end}")
