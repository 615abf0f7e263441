"""Services that cannot start say why in one line that tells what to do, and end with status 2."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from adapter_store import open_store
from lorafleet.ports import free_port
from tests.support.services.cluster import ROOT, Cluster


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


@pytest.fixture
def free() -> Iterator[list[str]]:
    """Two ports on which nobody listens."""
    with ExitStack() as reserved:
        yield [str(free_port(reserved, "127.0.0.1")) for _ in range(2)]


def start(module: str, arguments: list[str], environment: dict[str, str]) -> tuple[int, list[str]]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("LORAFLEET_")}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**clean, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()


def one_clear_line(module: str, arguments: list[str], named: str, **environment: str) -> None:
    status, lines = start(module, arguments, environment)
    assert status == 2, lines
    # What was logged before, and what gRPC itself logs of a port (E1231 23:59:59.000000 ...), does not count.
    said = [line for line in lines if not re.match(r"20\d\d-|E\d{4} ", line)]
    assert len(said) == 1, lines
    assert named in said[0], said


def test_scheduler(cluster: Cluster, taken: str, free: list[str], tmp_path: Path) -> None:
    port, metrics = free
    model, store = ["--model", str(cluster.model)], ["--store", str(tmp_path / "store")]
    ports = ["--listen", f"127.0.0.1:{port}", "--metrics-port", metrics]
    good = [*model, *store, *ports, "--executor", "127.0.0.1:1"]
    config, tokens, file = tmp_path / "config.toml", tmp_path / "tokens.toml", tmp_path / "file"
    config.write_text("max_qeued = 3\n")
    tokens.write_text("[[tokens]]\ntenant = 'a'\n")
    file.write_text("")
    (tmp_path / "empty").mkdir()
    cases: list[tuple[list[str], str]] = [
        ([], "--model"),
        ([*good, "--max-qeued", "3"], "--max-qeued"),
        ([*good, "--max-queued", "many"], "max_queued"),
        ([*good, "--config", str(config)], "max_qeued"),
        ([*good, "--config", str(tmp_path / "none.toml")], "none.toml"),
        ([*good, "--model", str(tmp_path / "nowhere")], "nowhere"),
        ([*good, "--model", str(tmp_path / "empty")], "config.json"),
        ([*good, "--store", str(file)], "store"),
        ([*good, "--executor", "nowhere"], "nowhere"),
        ([*good, "--tokens-file", str(tokens)], "tokens[0]"),
        (
            [*good, "--listen", "0.0.0.0:1234"],
            "--tokens-file or --jwt-keys-file, --tls-cert-file, --tls-key-file",
        ),
        ([*good, "--tls-cert-file", str(file), "--tls-key-file", str(file)], "no certificate"),
        ([*good, "--listen", f"127.0.0.1:{taken}"], taken),
        ([*good, "--metrics-port", taken], taken),
    ]
    for arguments, named in cases:
        one_clear_line("scheduler", arguments, named)
    one_clear_line("scheduler", good, "MAX_QEUED", LORAFLEET_SCHEDULER_MAX_QEUED="3")


def test_executor(cluster: Cluster, taken: str, free: list[str], tmp_path: Path) -> None:
    port, metrics = free
    model, store = ["--model", str(cluster.model)], ["--store", str(tmp_path / "store")]
    good = [*model, *store, "--listen", f"127.0.0.1:{port}", "--metrics-port", metrics]
    open_store(str(tmp_path / "store"))
    old = tmp_path / "old" / "names" / "acme"
    old.mkdir(parents=True)
    (old / "x.json").write_text('{"versions": {}, "aliases": {}}')
    config = tmp_path / "config.toml"
    config.write_text("max_lora = 3\n")
    cases: list[tuple[list[str], str]] = [
        ([], "--model"),
        ([*good, "--max-lora", "3"], "--max-lora"),
        ([*good, "--max-loras", "0"], "--max-loras"),
        ([*good, "--dtype", "int8"], "--dtype"),
        ([*good, "--config", str(config)], "max_lora"),
        ([*good, "--listen", "0.0.0.0:1234"], "--tls-cert-file, --tls-key-file, --tls-client-ca-file"),
        ([*good, "--store", f"disk:{tmp_path / 'storr'}"], str(tmp_path / "storr")),
        ([*good, "--store", str(tmp_path / "old")], "has format 1"),
        ([*good, "--listen", f"127.0.0.1:{taken}"], taken),
    ]
    for arguments, named in cases:
        one_clear_line("executor", arguments, named)
    assert not (tmp_path / "storr").exists()
    one_clear_line("executor", good, "max_lora", LORAFLEET_EXECUTOR_MAX_LORA="3")


def test_command_line(cluster: Cluster, taken: str, free: list[str], tmp_path: Path) -> None:
    serve = ["serve", "--model", str(cluster.model), "--store", str(tmp_path / "store")]
    nobody, _ = free
    cases: list[tuple[list[str], str]] = [
        ([*serve, "--model", str(tmp_path / "nowhere")], "nowhere"),
        ([*serve, "--port", taken], taken),
        ([*serve, "--port", "0", "--metrics-port", taken], taken),
        (["adapters", "push", str(tmp_path / "nowhere"), "name"], "nowhere"),
        (["generate", "--target", f"127.0.0.1:{nobody}", "hello"], nobody),
    ]
    for arguments, named in cases:
        status, lines = start("lorafleet", arguments, {})
        assert status in (1, 2), lines
        assert len(lines) == 1 and named in lines[0], lines
