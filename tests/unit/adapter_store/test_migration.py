"""From a folder to a Redis and back: everything arrives, and an ended run goes on where it was."""

import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest

from adapter_store import (
    AdapterStore,
    ModelSpec,
    PushOptions,
    PushWarning,
    Ref,
    StoreUnavailable,
    VersionState,
)
from lorafleet.migration import Migrated, migrate
from tests.support.stores.media import DiskMedium, Medium, RedisMedium, at, versions_in
from tests.support.stores.redis_server import RedisServer


@pytest.fixture(params=["disk to redis", "redis to disk", "disk to disk"])
def media(request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer) -> list[Medium]:
    kinds = request.param.split(" to ")
    return [
        DiskMedium(tmp_path / str(number)) if kind == "disk" else RedisMedium(redis_server, uuid.uuid4().hex)
        for number, kind in enumerate(kinds)
    ]


@pytest.fixture
def source(media: list[Medium], adapters: list[Path], spec: ModelSpec) -> AdapterStore:
    """acme/x with three versions and two aliases, acme/y protected, zoo/z draining; one deleted version."""
    store = media[0].open()
    for folder in adapters:
        store.put(folder, "acme", "x", spec)
    digests = [store.put(folder, "acme", "x", spec, PushOptions(dry_run=True)).digest for folder in adapters]
    store.split_alias("acme", "x", "prod", {digests[0]: 90, digests[1]: 10})
    store.set_protected("acme", "y", store.put(adapters[0], "acme", "y", spec).digest, True)
    store.put(adapters[1], "zoo", "z", spec)
    store.withdraw(Ref.parse("zoo/z", ""), VersionState.DRAINING)
    store.put(adapters[2], "zoo", "gone", spec, PushOptions(alias=None))
    store.withdraw(Ref("zoo", "gone", digest=digests[2]))
    return store


def everything(store: AdapterStore) -> Any:
    return [(store.summaries(tenant, deleted=False), store.aliases(tenant)) for tenant in ("acme", "zoo")]


def test_everything_but_the_deleted_arrives(
    source: AdapterStore, media: list[Medium], spec: ModelSpec
) -> None:
    target = media[1].open()
    assert migrate(source, target, spec, dry_run=True) == Migrated(copied=5)
    assert target.tenants() == []
    assert migrate(source, target, spec) == Migrated(copied=5)
    assert everything(target) == everything(source)
    assert target.tenants() == ["acme", "zoo"]
    for summary in target.summaries("acme"):
        target.verify(Ref("acme", summary.name, digest=summary.digest))
    assert source.orphans() == target.orphans() == []
    assert migrate(source, target, spec) == Migrated(present=5)


def test_what_others_found_about_a_push_arrives(
    media: list[Medium], adapters: list[Path], spec: ModelSpec
) -> None:
    """A scheduler, say, that tried its template."""
    found = PushWarning("FOUND", "by somebody")
    source, target = media[0].open(), media[1].open()
    pushed = source.put(adapters[0], "acme", "x", spec, PushOptions(warnings=(found,)))
    assert migrate(source, target, spec).copied == 1
    copied = target.find(Ref.parse("acme/x", ""))
    assert copied.push.warnings == pushed.push.warnings and found in copied.push.warnings


def test_one_tenant_alone(source: AdapterStore, media: list[Medium], spec: ModelSpec) -> None:
    target = media[1].open()
    assert migrate(source, target, spec, tenants=["zoo"]).copied == 1
    assert target.tenants() == ["zoo"]


@pytest.mark.parametrize("copies", [0, 2, 4])
def test_an_ended_run_goes_on(
    source: AdapterStore, media: list[Medium], spec: ModelSpec, copies: int
) -> None:
    target = media[1].open()
    put, left = target.put, [copies]

    def failing(*arguments: Any, **options: Any) -> Any:
        if not left[0]:
            raise StoreUnavailable("the target went away")
        left[0] -= 1
        return put(*arguments, **options)

    target.put = failing  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        migrate(source, target, spec)
    assert target.aliases("acme") == []  # none points to what is not there
    again = media[1].open()
    assert migrate(source, again, spec) == Migrated(copied=5 - copies, present=copies)
    assert everything(again) == everything(source)


def test_what_is_damaged_is_told_and_the_rest_goes_on(
    source: AdapterStore, media: list[Medium], spec: ModelSpec
) -> None:
    [version] = versions_in(source, "acme", name="y")
    rotten = next(v for v in versions_in(source, "acme", name="x") if v.digest != version.digest)
    media[0].change_pushed(rotten, "adapter_config.json", lambda data: data + b" ")
    target = media[1].open()
    done = migrate(source, target, spec)
    assert list(done.failed) == [f"acme/x@{rotten.digest}"]
    assert len(target.summaries("acme")) == 3


def test_a_name_whose_record_is_damaged_is_told_and_the_rest_goes_on(
    source: AdapterStore, media: list[Medium], spec: ModelSpec
) -> None:
    media[0].change_record("acme", "x", lambda data: data[:-1])
    target = media[1].open()
    done = migrate(media[0].open(), target, spec)
    assert [*done.failed] == ["acme/x"]
    assert target.find(Ref.parse("acme/y", "")).protected
    assert target.find(Ref.parse("zoo/z", "")).state is VersionState.DRAINING


def test_files_that_were_pushed_since_the_last_run_are_copied(
    source: AdapterStore, media: list[Medium], adapters: list[Path], spec: ModelSpec, tmp_path: Path
) -> None:
    target = media[1].open()
    migrate(source, target, spec)
    folder = Path(shutil.copytree(adapters[0], tmp_path / "again"))
    (folder / "README.md").write_text("what came later")
    version = source.put(folder, "acme", "y", spec)
    assert migrate(source, target, spec) == Migrated(present=5)
    target.export(at(version), tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text() == "what came later"
    assert everything(target) == everything(source)


def test_what_only_the_target_has_stays(
    source: AdapterStore, media: list[Medium], adapters: list[Path], spec: ModelSpec
) -> None:
    target = media[1].open()
    mine = target.put(adapters[0], "acme", "own", spec)
    target.put(adapters[2], "acme", "y", spec, PushOptions(alias="mine"))
    migrate(source, target, spec)
    assert target.resolve(Ref.parse("acme/own", "")) == mine
    assert {alias.alias for alias in target.aliases("acme", "y")} == {"latest", "mine"}
