"""Whatever keeps TLS from coming about, no handler runs and the client's error names the cause."""

import asyncio
import socket
import ssl
import warnings
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorafleet import AsyncClient, Client, InvalidRequest, LoraFleetError, Tls, Unavailable
from lorafleet.cli import main
from lorafleet.doors import Health
from lorafleet.tls.credentials import channel_credentials
from lorafleet.tls.health_port import HealthPort
from tests.support.services.certificates import Certificates, make_certificates
from tests.support.services.refusing_server import serving


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


CASES = {
    # what the server has (certificate, CA of clients), what the client has, the trouble, words of the message
    "plaintext-client": (("good", None), None, "SERVER_SPEAKS_TLS", "tls=Tls()"),
    "plaintext-client-mutual": (("good", "ca"), None, "SERVER_SPEAKS_TLS", "speaks TLS"),
    "plaintext-server": (None, (None, "ca"), "SERVER_SPEAKS_PLAINTEXT", "does not speak TLS"),
    "wrong-ca": (("good", None), (None, "other"), "UNKNOWN_CA", "Tls(ca=...)"),
    "public-roots": (("good", None), (None, None), "UNKNOWN_CA", "Tls(ca=...)"),
    "expired": (("expired", None), (None, "ca"), "EXPIRED", "has expired"),
    "wrong-name": (("other-name", None), (None, "ca"), "WRONG_NAME", "another name"),
    "no-client-certificate": (("good", "ca"), (None, "ca"), "NO_CLIENT_CERTIFICATE", "Tls(cert="),
    "foreign-client": (("good", "ca"), ("foreign-client", "ca"), "CLIENT_CERTIFICATE_REFUSED", "refused"),
    "expired-client": (("good", "ca"), ("expired-client", "ca"), "CLIENT_CERTIFICATE_REFUSED", "expired"),
    "server-as-client": (("good", "ca"), ("other-name", "ca"), "CLIENT_CERTIFICATE_REFUSED", "refused"),
}


@pytest.mark.parametrize("case", CASES)
async def test_the_error_names_the_cause_and_no_handler_runs(made: Certificates, case: str) -> None:
    there, here, trouble, words = CASES[case]
    tls = made.tls(*here) if here else None
    async with serving(made.tls(*there) if there else None) as (address, called):
        async with AsyncClient(address, tls=tls, timeout=20) as client:
            with pytest.raises(Unavailable) as caught:
                await client.models()
        plain = await asyncio.to_thread(plain_error, address, tls)
    assert called == []
    for error in (caught.value, plain):
        assert error.metadata == {"tls": trouble} and words in error.message and error.is_lost_connection


def plain_error(address: str, tls: Tls | None) -> Unavailable:
    with Client(address, tls=tls, timeout=20) as client, pytest.raises(Unavailable) as caught:
        client.fleet()
    return caught.value


async def test_credentials_of_grpc_are_taken_too(made: Certificates) -> None:
    async with serving(made.tls("good", None)) as (address, called):
        for credentials in (channel_credentials(made.tls(None)), made.tls(None)):
            async with AsyncClient(address, tls=credentials, timeout=20) as client:
                with pytest.raises(Exception, match="Method not found"):
                    await client.models()
        assert len(called) == 2


async def test_a_certificate_of_the_right_ca_is_let_in(made: Certificates) -> None:
    async with (
        serving(made.tls("good")) as (address, called),
        AsyncClient(address, tls=made.tls("client"), timeout=20) as client,
    ):
        with pytest.raises(Exception, match="Method not found"):
            await client.models()
    assert len(called) == 1


async def test_another_ca_of_clients_counts_from_the_next_connection(made: Certificates) -> None:
    clients = made.folder / "clients.crt"
    files = Tls(ca=clients, cert=made.folder / "good.crt", key=made.folder / "good.key")
    clients.write_bytes((made.folder / "ca.crt").read_bytes())
    async with serving(files) as (address, _):
        assert await get_in(address, made) == {"client"}
        clients.write_bytes((made.folder / "other.crt").read_bytes())
        assert await get_in(address, made) == {"foreign-client"}


async def get_in(address: str, made: Certificates) -> set[str]:
    found = set()
    for name in ("client", "foreign-client"):
        async with AsyncClient(address, tls=made.tls(name), timeout=20) as client:
            with pytest.raises(LoraFleetError) as caught:
                await client.models()
        if "Method not found" in caught.value.message:
            found.add(name)
    return found


@pytest.mark.parametrize("version", ["TLSv1_1", "TLSv1_2", "TLSv1_3"])
async def test_old_versions_of_tls_are_not_spoken(made: Certificates, version: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(made.ca)
    context.set_alpn_protocols(["h2"])
    context.set_ciphers("ALL:@SECLEVEL=0")  # Python's own default does not offer the old ones.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        context.minimum_version = context.maximum_version = ssl.TLSVersion[version]

    def speak(address: str) -> str | None:
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), 20) as connection:
                return context.wrap_socket(connection, server_hostname=host).version()
        except ssl.SSLError:
            return None

    async with serving(made.tls("good", None)) as (address, _):
        spoken = await asyncio.to_thread(speak, address)
    assert spoken == (None if version == "TLSv1_1" else version.replace("_", "."))


async def test_where_nobody_listens_nothing_is_said_of_tls(made: Certificates) -> None:
    async with AsyncClient("127.0.0.1:1", tls=made.tls(None), timeout=20) as client:
        with pytest.raises(Unavailable) as caught:
            await client.models()
    assert caught.value.metadata == {} and "refused" in caught.value.message


async def test_files_that_cannot_be_used_are_an_invalid_request(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"tls: .*nowhere\.crt"):
        Client("127.0.0.1:1", tls=Tls(ca=tmp_path / "nowhere.crt"))


async def test_the_health_port_answers_in_clear_and_serves_nothing_else() -> None:
    servicer = Health()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    port = HealthPort(servicer, "127.0.0.1", 0)
    await port.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port.port}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        for method in (
            "/lorafleet.v1.Inference/ListModels",
            "/lorafleet.v1.Executor/Describe",
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(method)(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await port.stop()


COMMANDS = {
    # what the server has, flags of the command, words of its one line
    "plaintext-client": (("good", None), [], "the server speaks TLS: use --tls"),
    "plaintext-server": (None, ["--tls"], "does not speak TLS on this port: check the port, or leave --tls"),
    "wrong-ca": (("good", None), ["--tls-ca", "other.crt"], "name its CA with --tls-ca"),
    "no-client-certificate": (
        ("good", "ca"),
        ["--tls-ca", "ca.crt"],
        "give one with --tls-cert and",
    ),
    "half-a-pair": (None, ["--tls-cert", "client.crt"], "a certificate and its key go together"),
}


@pytest.mark.parametrize("case", COMMANDS)
async def test_the_command_says_which_flag_helps(
    made: Certificates, case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, flags, words = COMMANDS[case]
    monkeypatch.chdir(made.folder)
    async with serving(made.tls(*there) if there else None) as (address, called):
        status = await asyncio.to_thread(main, ["models", "--target", address, "--timeout", "20", *flags])
    (line,) = capsys.readouterr().err.splitlines()
    assert (status, called) == (1, []) and line.startswith("error: ") and words in line


async def test_the_environment_names_files_too(
    made: Certificates, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, file in (("CA", "ca.crt"), ("CERT", "client.crt"), ("KEY", "client.key")):
        monkeypatch.setenv(f"LORAFLEET_TLS_{variable}", str(made.folder / file))
    async with serving(made.tls("good")) as (address, called):
        await asyncio.to_thread(main, ["models", "--target", address, "--timeout", "20"])
    assert called and "Method not found" in capsys.readouterr().err
