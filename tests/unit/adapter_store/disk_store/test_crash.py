"""A process killed at any step of a change leaves the store as before or as after, and nothing that stays."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from adapter_store import DiskStore, ModelSpec, Ref, Version
from tests.support.adapters.peft import edit_config
from tests.support.stores.crashes import run_until_step
from tests.support.stores.garbage import garbage
from tests.support.stores.media import DiskMedium, versions_in

# Calls into C that touch the disk; the profiler announces each before it is made. Buffered writes count too:
# a file opened for writing in place is then seen empty.
STEPS = frozenset({"open", "write", "fsync", "sendfile", "rename", "mkdir", "unlink", "rmdir", "flock"})


def state(store: DiskStore) -> tuple[frozenset[tuple[str, str]], tuple[tuple[str, str], ...]]:
    return (
        frozenset((version.digest, version.push.base_model) for version in versions_in(store, "acme")),
        tuple((alias.alias, alias.digest) for alias in store.aliases("acme")),
    )


def check_clean(root: Path) -> DiskStore:
    """Opens the store as a restarted process would: every version reads, and nothing else is on the disk."""
    store = DiskStore(root)
    digests = {version.digest for version in versions_in(store, "acme")}
    for digest in digests:
        store.open(digest).close()
        store.verify(Ref("acme", "x", digest=digest))
    assert {path.name for path in (root / "blobs").iterdir()} == {d.removeprefix("sha256:") for d in digests}
    assert garbage(DiskMedium(root)) == []
    return store


@pytest.fixture
def root(tmp_path: Path, adapters: list[Path], spec: ModelSpec) -> Path:
    """A store with one version, to be copied for each crash."""
    DiskStore(tmp_path / "origin").put(adapters[0], "acme", "x", spec)
    return tmp_path / "origin"


def crash_everywhere(
    root: Path, tmp_path: Path, action: Callable[[DiskStore], object], every: int = 1
) -> list[DiskStore]:
    """Kills `action` before each of its steps, or some of them, on a fresh copy of `root` each time."""

    def prepared(number: int) -> Callable[[], object]:
        copy = shutil.copytree(root, tmp_path / str(number))
        return lambda: action(DiskStore(copy))

    total = run_until_step(prepared(-1), kill_at=-1, steps=STEPS)
    assert total > 5
    before, after = state(DiskStore(root)), state(check_clean(tmp_path / "-1"))
    assert before != after
    stores = []
    for step in range(0, total, every):
        assert run_until_step(prepared(step), kill_at=step, steps=STEPS) == -1
        store = check_clean(tmp_path / str(step))
        assert state(store) in (before, after)
        stores.append(store)
    return stores


def test_put(root: Path, tmp_path: Path, adapters: list[Path], spec: ModelSpec) -> None:
    def put(store: DiskStore) -> Version:
        return store.put(adapters[1], "acme", "x", spec)

    for store in crash_everywhere(root, tmp_path, put):
        pushed = put(store)
        assert store.resolve(Ref.parse("acme/x", "")).digest == pushed.digest
        assert len(versions_in(store, "acme")) == 2


def test_put_of_other_files(root: Path, tmp_path: Path, adapters: list[Path], spec: ModelSpec) -> None:
    edited = Path(shutil.copytree(adapters[0], tmp_path / "edited"))
    edit_config(edited, base_model_name_or_path="another/name")

    def put(store: DiskStore) -> Version:
        return store.put(edited, "acme", "x", spec)

    for store in crash_everywhere(root, tmp_path, put, every=3):  # most are as those of test_put
        [version] = versions_in(store, "acme")
        store.export(Ref("acme", "x", digest=version.digest), store._root / "out")
        config = json.loads((store._root / "out" / "adapter_config.json").read_text())
        assert config.get("base_model_name_or_path", "") == version.push.base_model


def test_delete(root: Path, tmp_path: Path, adapters: list[Path], spec: ModelSpec) -> None:
    for store in crash_everywhere(root, tmp_path, lambda store: store.delete(Ref.parse("acme/x", ""))):
        store.put(adapters[0], "acme", "x", spec)
        assert len(versions_in(store, "acme")) == 1


def test_set_alias(root: Path, tmp_path: Path) -> None:
    [version] = versions_in(DiskStore(root), "acme")
    crash_everywhere(root, tmp_path, lambda store: store.set_alias("acme", "x", "prod", version.digest))


def test_a_crash_does_not_disturb_a_writer_at_work(
    root: Path, tmp_path: Path, adapters: list[Path], spec: ModelSpec
) -> None:
    """Cleaning up after one process must leave alone what another one is still writing."""
    store = DiskStore(root)
    with store._workspace() as work:
        (work / "half-written").write_text("")
        run_until_step(lambda: DiskStore(root).put(adapters[1], "acme", "x", spec), kill_at=40, steps=STEPS)
        DiskStore(root)
        assert [path.name for path in (root / "tmp").iterdir()] == [work.name]
    assert list((root / "tmp").iterdir()) == []
