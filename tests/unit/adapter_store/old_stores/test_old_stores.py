"""Stores as earlier revisions wrote them, 83b59f4^ (format 2) and 9110afc (format 3), are migrated.

Tenant acme has x (two versions, aliases latest and prod), y (the second of them, protected) and gone, which
is deleted; zoo has z, draining: the content of acme/x's first version, pushed after it, with a base name of
its own.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapter_store import AdapterStore, DiskStore, ModelSpec, OtherFormat, Ref, VersionState, open_store
from adapter_store.old_stores.open import MigrationSource, open_source
from lorafleet.migration import Migrated, migrate
from tests.support.stores.media import versions_in
from tests.support.stores.redis_server import RedisServer

HERE = Path(__file__).parent
SPEC = ModelSpec(
    fingerprint="0" * 64,
    architecture="LlamaForCausalLM",
    num_layers=1,
    vocab_size=128,
    tied_head=False,
    hidden_size=64,
    modules={
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (64, 64)),
        "gate_proj": (64, 96),
        "up_proj": (64, 96),
        "down_proj": (96, 64),
        "embed_tokens": (128, 64),
        "lm_head": (64, 128),
    },
    max_model_len=512,
    name="d0",
)


def folder_store(number: int, root: Path, change: Callable[[str, bytes], bytes]) -> str:
    for name, content in json.loads((HERE / f"disk-{number}.json").read_text()).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(change(name, base64.b64decode(content)))
    return f"disk:{root}"


def redis_store(number: int, server: RedisServer, change: Callable[[str, bytes], bytes]) -> str:
    with server.client() as client:
        client.flushall()
        for key, (kind, value) in json.loads((HERE / f"redis-{number}.json").read_text()).items():
            _set(client, kind, key, value, change)
    return f"{server.url}?namespace=old"


def _set(client: Any, kind: str, key: str, value: Any, change: Callable[[str, bytes], bytes]) -> None:
    decode = base64.b64decode
    if kind == "string":
        client.set(key, change(key, decode(value)))
    elif kind == "hash":
        fields = {name: change(f"{key} {name}", decode(each)) for name, each in value.items()}
        client.hset(key, mapping=fields)
    elif kind == "zset":
        client.zadd(key, {decode(member): score for member, score in value})
    else:
        client.sadd(key, *map(decode, value))


Old = Callable[..., tuple[str, int]]


@pytest.fixture(params=[("disk", 2), ("disk", 3), ("redis", 2), ("redis", 3)], ids=lambda p: f"{p[0]} {p[1]}")
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Old:
    kind, number = request.param

    def make(change: Callable[[str, bytes], bytes] = lambda name, data: data) -> tuple[str, int]:
        if kind == "disk":
            return folder_store(number, tmp_path / "old", change), number
        server = request.getfixturevalue("own_server")
        return redis_store(number, server, change), number

    return make


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with RedisServer(tmp_path_factory.mktemp("old")) as server:
        yield server


def migrated(old: tuple[str, int], target: AdapterStore) -> tuple[MigrationSource, Migrated]:
    source, number = open_source(old[0])
    assert number == old[1]
    return source, migrate(source, target, SPEC, source_format=number)


def test_they_arrive_with_all_that_is_said_about_them(old: Old, tmp_path: Path) -> None:
    target, made = DiskStore(tmp_path / "new"), old()
    source, done = migrated(made, target)
    assert (done.copied, done.present, done.failed) == (4, 0, {})
    assert len(done.renamed) == (4 if made[1] == 2 else 0)  # names, versions of two of which are the same
    first, second = (alias.digest for alias in target.aliases("acme", "x"))
    latest = source.record("acme", "x").aliases["latest"]
    assert done.renamed.get(f"acme/x@{latest.digest}", latest.digest) == first
    [prod] = [alias for alias in target.aliases("acme", "x") if alias.alias == "prod"]
    assert prod.weights == {second: 90, first: 10} and prod.generation == 1
    assert target.find(Ref.parse("acme/y", "")).protected
    assert target.find(Ref.parse("zoo/z", "")).state is VersionState.DRAINING
    assert target.resolve(Ref.parse("acme/x", "")).manifest.chat_template == "{{ messages[0].content }}"
    assert not target.record("acme", "gone").versions
    for tenant in target.tenants():
        for each in versions_in(target, tenant):
            target.verify(Ref(tenant, each.name, digest=each.digest))
    _, again = migrated(made, target)
    assert (again.copied, again.present, again.failed) == (0, 4, {})


def test_a_content_of_several_tenants_brings_nothing_of_one_to_another(old: Old, tmp_path: Path) -> None:
    target = DiskStore(tmp_path / "new")
    migrated(old(), target)
    [shared] = {version.digest for version in versions_in(target, "zoo")}
    sides = (("zoo", "z", "zoo/base", "acme"), ("acme", "x", "acme/secret-base", "zoo"))
    for tenant, name, base, other in sides:
        out = tmp_path / "out" / tenant
        target.export(Ref(tenant, name, digest=shared), out)
        told = b"".join(path.read_bytes() for path in out.iterdir())
        assert base.encode() in told and other.encode() not in told
        assert target.find(Ref(tenant, name, digest=shared)).push.base_model == base
    own = target.resolve(Ref.parse("acme/y", ""))
    target.export(Ref("acme", "y", digest=own.digest), tmp_path / "own")
    assert (tmp_path / "own" / "tokenizer_config.json").exists()


def test_what_is_damaged_is_told_and_the_rest_arrives(old: Old, tmp_path: Path) -> None:
    """A byte of the data of two versions' weights, as old files have them."""

    def change(name: str, data: bytes) -> bytes:
        is_weights = name.endswith("adapter_model.safetensors") or (":{sha256:" in name and len(data) > 1200)
        return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:] if is_weights else data

    target = DiskStore(tmp_path / "new")
    _, done = migrated(old(change), target)
    assert (done.copied, len(done.failed)) == (0, 4) and target.tenants() == []


def test_records_and_manifests_are_sealed(old: Old, tmp_path: Path) -> None:
    def change(name: str, data: bytes) -> bytes:
        return data.replace(b'"protected": true', b'"protected": null') if "acme/y" in name else data

    target = DiskStore(tmp_path / "new")
    _, done = migrated(old(change), target)
    assert done.copied == 3 and not target.record("acme", "y").versions
    assert [*done.failed] == ["acme/y"]


def test_who_may_have_a_content_is_not_known_beside_a_damaged_record(old: Old, tmp_path: Path) -> None:
    """The files beside zoo's content are those of acme, which pushed it first."""

    def change(name: str, data: bytes) -> bytes:
        return data[:-1] if name.endswith(("acme/x", "acme/x.json")) else data

    target = DiskStore(tmp_path / "new")
    migrated(old(change), target)
    target.export(Ref("zoo", "z", digest=versions_in(target, "zoo")[0].digest), tmp_path / "out")
    assert b"acme" not in b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())


def test_files_of_a_first_pusher_who_is_gone_are_nobodys(
    old: Old, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """acme removed x, and the content stayed for zoo, which called the base otherwise."""
    url, number = old()
    if url.startswith("disk:"):
        (Path(url.removeprefix("disk:")) / "names/acme/x.json").unlink()
    else:
        with request.getfixturevalue("own_server").client() as client:
            client.delete(*client.keys("*record:acme/x"))
    target = DiskStore(tmp_path / "new")
    migrated((url, number), target)
    target.export(Ref("zoo", "z", digest=versions_in(target, "zoo")[0].digest), tmp_path / "out")
    assert b"acme" not in b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())


def test_no_service_takes_them(old: Old) -> None:
    url, number = old()
    with pytest.raises(OtherFormat, match=f"format {number}, not 4: `lorafleet adapters migrate` copies it"):
        open_store(url)
