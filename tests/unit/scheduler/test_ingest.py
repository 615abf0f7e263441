"""Pushes in a process of their own."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adapter_store import DiskStore, GenerationMismatch, InvalidAdapter, ModelSpec
from scheduler.errors import StoreUnavailable
from scheduler.ingest import Ingest, Push

PUSH = Push("acme", "x", "latest", strict_base=False, dry_run=False, expected_generation=None)


@pytest.fixture
def ingest(tmp_path: Path) -> Iterator[Ingest]:
    ingest = Ingest(f"disk:{tmp_path / 'store'}")
    yield ingest
    ingest.close()


async def test_a_push_is_stored_and_its_folder_goes(
    ingest: Ingest, store: DiskStore, spec: ModelSpec, peft_folder: Callable[..., Path]
) -> None:
    folder = peft_folder(1)
    first = await ingest.put(folder, PUSH, spec)
    assert first.created
    assert not folder.exists()
    again = await ingest.put(peft_folder(1), PUSH, spec)
    assert (again.created, again.version) == (False, first.version)
    assert [version.digest for version in store.list("acme")] == [first.version.digest]


async def test_errors_come_back_typed(
    ingest: Ingest, store: DiskStore, spec: ModelSpec, peft_folder: Callable[..., Path]
) -> None:
    broken = peft_folder(1)
    (broken / "adapter_model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(InvalidAdapter, match=r"adapter_model\.safetensors"):
        await ingest.put(broken, PUSH, spec)
    assert not broken.exists()
    behind = Push("acme", "x", "latest", strict_base=False, dry_run=False, expected_generation=3)
    with pytest.raises(GenerationMismatch):
        await ingest.put(peft_folder(2), behind, spec)
    assert store.list("acme") == []


async def test_a_cancelled_push_keeps_its_folder_until_it_is_done(
    ingest: Ingest, store: DiskStore, spec: ModelSpec, peft_folder: Callable[..., Path]
) -> None:
    first, second = peft_folder(1), peft_folder(2)
    running = asyncio.create_task(ingest.put(first, PUSH, spec))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    pushed = await ingest.put(second, PUSH, spec)
    assert not first.exists() and not second.exists()
    # Either it was too late to cancel, and then the whole of it is there, or nothing is.
    assert len(store.list("acme")) in (1, 2)
    assert pushed.version in store.list("acme")


async def test_a_dead_process_is_replaced(
    ingest: Ingest, spec: ModelSpec, peft_folder: Callable[..., Path]
) -> None:
    await ingest.put(peft_folder(1), PUSH, spec)
    assert ingest._pool is not None
    (worker,) = ingest._pool._processes.values()
    os.kill(worker.pid or 0, signal.SIGKILL)
    worker.join()
    folder = peft_folder(2)
    with pytest.raises(StoreUnavailable):
        await ingest.put(folder, PUSH, spec)
    assert not folder.exists()
    assert (await ingest.put(peft_folder(3), PUSH, spec)).created
