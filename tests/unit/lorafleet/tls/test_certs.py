"""`lorafleet certs` makes what services and clients start with, and overwrites nothing."""

import asyncio
import stat
from pathlib import Path

import pytest

from lorafleet.cli import main
from lorafleet.tls.files import Tls, read
from tests.support.services.refusing_server import serving


def certs(folder: Path, *arguments: str) -> int:
    return main(["certs", str(folder), *arguments])


def files(folder: Path, name: str, ca: str) -> Tls:
    return Tls(folder / f"{ca}.crt", folder / f"{name}.crt", folder / f"{name}.key")


async def test_what_is_made_locks_both_doors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "certs"
    assert certs(folder, "--scheduler", "localhost", "--scheduler", "127.0.0.1", "--client", "alice") == 0
    assert certs(folder, "--executor", "127.0.0.1") == 0
    names = ["scheduler", "client-alice", "executor", "scheduler-client"]
    assert capsys.readouterr().out.split() == [str(folder / f"{name}.crt") for name in names]
    for key in folder.glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    flags = ["--tls-ca", str(folder / "ca.crt")]
    alice = ["--tls-cert", str(folder / "client-alice.crt"), "--tls-key", str(folder / "client-alice.key")]
    inner = ["--tls-ca", str(folder / "executor-ca.crt")]
    for server, client, is_let_in in (
        (files(folder, "scheduler", "ca"), [*flags, *alice], True),
        (files(folder, "scheduler", "ca"), flags, False),
        (files(folder, "executor", "executor-ca"), [*inner, *alice], False),  # Clients reach no executor.
    ):
        async with serving(server) as (address, called):
            await asyncio.to_thread(main, ["models", "--target", address, "--timeout", "20", *client])
        assert bool(called) == is_let_in


def test_nothing_is_overwritten_but_by_renewal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    everything = ["--scheduler", "localhost", "--executor", "*.executor", "--client", "alice"]
    assert certs(tmp_path, *everything) == 0
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for arguments in (everything, ["--scheduler", "x"], ["--executor", "x"], ["--client", "alice"]):
        assert certs(tmp_path, *arguments) == 1
        assert "is there already; --renew" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert certs(tmp_path, "--renew", "--days", "9") == 0
    for name, content in before.items():
        assert ((tmp_path / name).read_bytes() == content) == name.startswith(("ca.", "executor-ca."))
    assert read(files(tmp_path, "executor", "executor-ca")).cert != before["executor.crt"]


@pytest.mark.parametrize(
    "arguments", [[], ["--client", "../x"], ["--client", ""], ["--scheduler", "ü.example"]]
)
def test_what_cannot_be_made_is_one_clear_line(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert certs(tmp_path, *arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert not list(tmp_path.glob("client*"))
