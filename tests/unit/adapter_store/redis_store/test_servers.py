"""Which servers are taken, how they are logged in to, and that nobody learns the password."""

import logging
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from adapter_store import Lease, ModelSpec, PushOptions, Ref, StoreUnavailable, UnsafeStore, open_store
from lorafleet.ports import free_port
from tests.support.services.proxy import Proxy
from tests.support.stores.media import RedisMedium, versions_in
from tests.support.stores.redis_server import RedisServer

LATEST = Ref.parse("acme/x", "")
# All that a store needs, and nothing that could harm other users of the server.
ACL_RULES = (
    "~lorafleet:* resetchannels -@all +@read +@write -@dangerous +eval +role +info +waitaof "
    "+wait +time +ping +select +client|setinfo"
)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_evicts_is_refused(own_server: RedisServer, policy: str) -> None:
    with own_server.client() as client:
        client.config_set("maxmemory-policy", policy)
    with pytest.raises(UnsafeStore, match=policy):
        open_store(f"{own_server.url}?allow_volatile=1")


def test_a_server_without_append_only_file_is_refused_unless_allowed(
    own_server: RedisServer, adapters: list[Path], spec: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    with own_server.client() as client:
        client.config_set("appendonly", "no")
    with pytest.raises(UnsafeStore, match="--allow-volatile"):
        open_store(own_server.url)
    for store in (
        open_store(f"{own_server.url}?allow_volatile=1"),
        open_store(own_server.url, allow_volatile=True),
    ):
        store.put(adapters[0], "acme", "x", spec)
    assert "may lose adapters" in caplog.text


def test_a_server_that_turns_unsafe_acknowledges_nothing_more(
    own_server: RedisServer, adapters: list[Path], spec: ModelSpec
) -> None:
    store = open_store(own_server.url)
    version = store.put(adapters[0], "acme", "x", spec)
    with own_server.client() as client:
        client.config_set("appendonly", "no")
        with pytest.raises(UnsafeStore):
            store.set_alias("acme", "x", "prod", version.digest)
        client.config_set("appendonly", "yes")
    store.set_alias("acme", "x", "canary", version.digest)


def test_a_full_server_still_answers_and_deletes(
    own_server: RedisServer, adapters: list[Path], spec: ModelSpec
) -> None:
    store = open_store(own_server.url)
    version = store.put(adapters[0], "acme", "x", spec)
    with own_server.client() as client:
        client.config_set("maxmemory", "1")
        with pytest.raises(StoreUnavailable, match="is full"):
            store.put(adapters[1], "acme", "x", spec)
        assert store.resolve(LATEST) == version
        store.open(version.digest).close()
        store.delete(LATEST)
        assert not [key for key in client.scan_iter() if b":{sha256:" in key]
        client.config_set("maxmemory", "0")
    store.put(adapters[1], "acme", "x", spec)


def test_a_server_that_is_stopped_is_unavailable_in_bounded_time(own_server: RedisServer) -> None:
    store = open_store(f"{own_server.url}?timeout=3")
    own_server.pause()
    with pytest.raises(StoreUnavailable):
        store.resolve(LATEST)
    own_server.go_on()
    assert versions_in(store, "acme") == []


@pytest.fixture
def guarded(own_server: RedisServer) -> RedisServer:
    """Known to one user only: fleet, password hunter2."""
    with own_server.client() as client:
        client.execute_command("ACL", "SETUSER", "fleet", "on", ">hunter2", *ACL_RULES.split())
        client.execute_command("ACL", "SETUSER", "default", "off")
    return own_server


def test_a_user_with_few_rights_is_enough(
    guarded: RedisServer, adapters: list[Path], spec: ModelSpec, tmp_path: Path
) -> None:
    (tmp_path / "password").write_text("hunter2\n")
    address = f"127.0.0.1:{guarded.port}"
    store = open_store(f"redis://fleet@{address}?password_file={tmp_path / 'password'}")
    version = store.put(adapters[0], "acme", "x", spec)
    store.set_alias("acme", "x", "prod", version.digest)
    store.delete_alias("acme", "x", "prod")
    store.verify(LATEST)
    store.export(LATEST, tmp_path / "out")
    other = store.put(adapters[1], "acme", "y", spec, PushOptions(alias=None))
    assert store.active_names(other.digest) == [("acme", "y")] and store.now() > 1e9
    store.hold(Lease("me", 1, frozenset({("acme/y", other.digest)})))
    assert [lease.holder for lease in store.leases()] == ["me"]
    store.let_go("me")
    store.withdraw(Ref("acme", "y", digest=other.digest))
    assert [each.digest for each in store.collect(0, lambda _: False)] == [other.digest]
    assert (store.tenants(), store.orphans(), store.news(-1).names) == (["acme"], [], None)
    assert (store.count("acme"), store.damaged("acme")) == (1, [])
    with guarded.client(username="fleet", password="hunter2") as client:
        client.set("lorafleet:{meta}:record:acme/x", b"{")
    store.delete_damaged("acme", "x")
    assert store.put(adapters[0], "acme", "x", spec).digest == version.digest
    assert versions_in(open_store(f"redis://fleet:hunter2@{address}"), "acme") == [store.resolve(LATEST)]
    store.delete(LATEST)


@pytest.mark.parametrize("login", ["fleet:hunter3@", ":hunter3@", ""])
def test_secrets_are_neither_told_nor_logged(
    guarded: RedisServer, caplog: pytest.LogCaptureFixture, login: str
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(StoreUnavailable) as error:
        open_store(f"redis://{login}127.0.0.1:{guarded.port}")
    chain: BaseException | None = error.value
    while chain is not None:
        assert "hunter" not in repr(chain)
        chain = chain.__cause__ or chain.__context__
    assert "hunter" not in caplog.text


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, file = folder / "key.pem", folder / "cert.pem"
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    command = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names)
    subprocess.run([*command, "-keyout", key, "-out", file], check=True, capture_output=True)
    return file, key


@pytest.fixture
def tls_proxy(own_server: RedisServer, certificate: tuple[Path, Path]) -> Iterator[Proxy]:
    """Asks for a client's certificate, too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(certificate[0])
    with Proxy(own_server.port, tls=context) as proxy:
        yield proxy


def test_tls_in_both_directions(
    tls_proxy: Proxy, certificate: tuple[Path, Path], adapters: list[Path], spec: ModelSpec
) -> None:
    file, key = certificate
    url = f"rediss://127.0.0.1:{tls_proxy.port}?timeout=20"
    store = open_store(f"{url}&ca_file={file}&cert_file={file}&key_file={key}")
    version = store.put(adapters[0], "acme", "x", spec)
    store.open(version.digest).close()
    for worse in (url, f"{url}&ca_file={file}"):
        with pytest.raises(StoreUnavailable):
            open_store(worse)


def test_every_command_keeps_to_one_slot_of_a_cluster(
    tmp_path: Path, adapters: list[Path], spec: ModelSpec
) -> None:
    """One node that owns all slots answers CROSSSLOT to what a larger cluster could not do."""
    with ExitStack() as reserved:
        # Of its own choice the server's second port may be an outgoing connection's.
        bus = ("--cluster-port", str(free_port(reserved, "127.0.0.1")))
        server = reserved.enter_context(RedisServer(tmp_path / "redis", "--cluster-enabled", "yes", *bus))
        with server.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
                pass
        store = open_store(server.url)
        versions = [store.put(folder, "acme", "x", spec) for folder in adapters]
        store.put(adapters[0], "zoo", "y", spec)
        for version in versions:
            store.verify(Ref("acme", "x", digest=version.digest))
        assert len(versions_in(store, "acme")) == 3 and len(store.aliases("acme")) == 1
        assert store.active_names(versions[0].digest) == [("acme", "x"), ("zoo", "y")]
        store.hold(Lease("me", 1))
        assert store.leases() == [Lease("me", 1)]
        upload = store.upload(Ref("acme", "x", digest=versions[0].digest))
        assert store.set_quarantined("acme", "x", versions[0].digest, False, upload=upload)
        store.delete(LATEST)
        store.delete(Ref("acme", "x", digest=versions[0].digest))
        RedisMedium(server, "lorafleet").change_record("zoo", "y", lambda record: b"{")
        assert [each.digest for each in store.delete_damaged("zoo", "y")] == [versions[0].digest]
        assert [each.digest for each in store.collect(0, lambda _: False)] == [versions[0].digest]
        assert (store.count("acme"), store.count("zoo")) == (1, 0)
        with server.client() as client:
            chunks = [key for key in client.scan_iter() if b":{sha256:" in key]
        assert len(chunks) == 3
