"""Passwords, certificates and settings that change while a store is open: no restart is needed."""

import logging
import ssl
import subprocess
from pathlib import Path

import pytest

from adapter_store import AdapterStore, ModelSpec, Ref, StoreUnavailable, UnsafeStore, open_store
from adapter_store.redis_store import login, primary
from tests.support.services.proxy import Proxy
from tests.support.stores.redis_server import RedisServer

LATEST = Ref.parse("acme/x", "")


@pytest.fixture(autouse=True)
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again in these tests is so for another reason than that time has passed."""
    monkeypatch.setattr(login, "PAUSE_SECONDS", 3600.0)


def new_password(server: RedisServer, old: str, new: str) -> None:
    """As an operator changes it; connections that are open are logged in, so they are cut."""
    with server.client(password=old) as client:
        client.config_set("requirepass", new)
        client.execute_command("CLIENT", "KILL", "SKIPME", "no")


def refused_logins(server: RedisServer, password: str) -> int:
    with server.client(password=password) as client:
        return int(client.info("stats")["acl_access_denied_auth"])


@pytest.fixture
def secret(own_server: RedisServer, tmp_path: Path) -> Path:
    """The file with the password of `own_server`, at first "one"."""
    file = tmp_path / "password"
    file.write_text("one\n")
    with own_server.client() as client:
        client.config_set("requirepass", "one")
    return file


@pytest.fixture
def store(own_server: RedisServer, secret: Path) -> AdapterStore:
    return open_store(f"{own_server.url}?password_file={secret}")


def test_a_password_that_changed_everywhere(
    own_server: RedisServer, secret: Path, store: AdapterStore, adapters: list[Path], spec: ModelSpec
) -> None:
    version = store.put(adapters[0], "acme", "x", spec)
    secret.write_text("two\n")
    new_password(own_server, "one", "two")
    assert store.put(adapters[1], "acme", "y", spec).name == "y"
    store.open(version.digest).close()
    secret.unlink()  # once it was read, it may go
    with own_server.client(password="two") as client:
        client.execute_command("CLIENT", "KILL", "SKIPME", "no")
    assert store.resolve(LATEST) == version
    assert refused_logins(own_server, "two") == 0


def test_a_file_that_follows_later_ends_the_outage_at_once_and_logins_were_few(
    own_server: RedisServer, secret: Path, store: AdapterStore, adapters: list[Path], spec: ModelSpec
) -> None:
    version = store.put(adapters[0], "acme", "x", spec)
    new_password(own_server, "one", "two")
    for _ in range(40):
        with pytest.raises(StoreUnavailable, match="refused the login"):
            store.resolve(LATEST)
    assert refused_logins(own_server, "two") == 1
    secret.write_text("two")
    assert store.resolve(LATEST) == version


def test_a_password_that_counts_again_is_tried_again_after_a_pause(
    own_server: RedisServer, store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_password(own_server, "one", "two")
    monkeypatch.setattr(login, "PAUSE_SECONDS", 0.0)
    with pytest.raises(StoreUnavailable):
        store.tenants()
    new_password(own_server, "two", "one")
    assert store.tenants() == []


def certify(folder: Path) -> ssl.SSLContext:
    """Writes a new certificate over the former one; a server's context that trusts nothing else."""
    file, key = folder / "cert.pem", folder / "key.pem"
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    command = ("openssl", "req", "-x509", *curve, "-nodes", "-days", "2", *names)
    subprocess.run([*command, "-keyout", key, "-out", file], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(file)
    return context


def test_certificates_and_keys_that_change(own_server: RedisServer, tmp_path: Path) -> None:
    """The server's, the authority that vouches for it, and our own, all at once."""
    with Proxy(own_server.port, tls=certify(tmp_path)) as proxy:
        files = f"ca_file={tmp_path}/cert.pem&cert_file={tmp_path}/cert.pem&key_file={tmp_path}/key.pem"
        store = open_store(f"rediss://127.0.0.1:{proxy.port}?{files}")
        proxy._tls = certify(tmp_path)
        proxy.cut()
        assert store.tenants() == []


@pytest.mark.parametrize(
    ("setting", "bad", "good"),
    [("maxmemory-policy", "allkeys-lru", "noeviction"), ("appendonly", "no", "yes")],
)
def test_settings_that_turn_unsafe_are_told_and_refuse_pushes_alone(
    own_server: RedisServer,
    adapters: list[Path],
    spec: ModelSpec,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    bad: str,
    good: str,
) -> None:
    store = open_store(own_server.url)
    version = store.put(adapters[0], "acme", "x", spec)
    with own_server.client() as client:
        client.config_set(setting, bad)
        with pytest.raises(UnsafeStore, match=setting):
            store.put(adapters[1], "acme", "y", spec)
        assert [record.levelname for record in caplog.records] == ["ERROR"] and setting in caplog.text
        assert setting in store.problem()
        client.config_set(setting, good)
        assert store.put(adapters[2], "acme", "y", spec).name == "y"
        assert "again" in caplog.text and store.problem() == ""
        caplog.clear()
        monkeypatch.setattr(primary, "LOOK_SECONDS", 0.0)  # nobody pushes: the next question finds out
        client.config_set(setting, bad)
        assert [store.resolve(LATEST), store.resolve(LATEST)] == [version, version]
        assert store.count("acme") == 2, "the refused push left something"
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        client.execute_command("CLIENT", "KILL", "SKIPME", "yes")
        store.open(version.digest).close()  # found anew, too
        with pytest.raises(UnsafeStore):
            open_store(own_server.url)
