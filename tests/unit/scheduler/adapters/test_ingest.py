"""Pushes in a process of their own."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import pytest_asyncio

from adapter_store import (
    DiskStore,
    GenerationMismatch,
    IncompatibleAdapter,
    InvalidAdapter,
    ModelSpec,
    PushOptions,
    Ref,
    TenantFull,
)
from scheduler.adapters.ingest import Ingest, Push, PushLimits
from scheduler.errors import StoreUnavailable
from scheduler.text.chat import ChatTemplates
from tests.support.services.cluster import wait_until
from tests.support.services.processes import is_running
from tests.support.stores.media import versions_in

PUSH = Push("acme", "x")


@pytest_asyncio.fixture
async def templates() -> AsyncIterator[ChatTemplates]:
    with ThreadPoolExecutor(1) as pool:
        templates = ChatTemplates(None, {}, pool, cpu_limit_s=0.3)
        yield templates
        await templates.close()


@pytest.fixture
def ingest(tmp_path: Path, templates: ChatTemplates) -> Iterator[Ingest]:
    ingest = Ingest(f"disk:{tmp_path / 'store'}", templates)
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
    assert [version.digest for version in versions_in(store, "acme")] == [first.version.digest]


async def test_errors_come_back_typed(
    ingest: Ingest, store: DiskStore, spec: ModelSpec, peft_folder: Callable[..., Path]
) -> None:
    broken = peft_folder(1)
    (broken / "adapter_model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(InvalidAdapter, match=r"adapter_model\.safetensors"):
        await ingest.put(broken, PUSH, spec)
    assert not broken.exists()
    behind = Push("acme", "x", PushOptions(expected_generation=3))
    with pytest.raises(GenerationMismatch):
        await ingest.put(peft_folder(2), behind, spec)
    assert versions_in(store, "acme") == []


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_template_that_cannot_run_is_refused_and_leaves_nothing(
    ingest: Ingest, store: DiskStore, spec: ModelSpec, peft_folder: Callable[..., Path], dry_run: bool
) -> None:
    folder = peft_folder(1)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}")
    with pytest.raises(InvalidAdapter, match=r"chat_template\.jinja: .*line 1: Unexpected end of template"):
        await ingest.put(folder, Push("acme", "x", PushOptions(dry_run=dry_run)), spec)
    assert not folder.exists() and versions_in(store, "acme") == [] and store.orphans() == []


async def test_a_template_that_fails_for_some_conversations_is_pushed_and_told(
    ingest: Ingest, store: DiskStore, spec: ModelSpec, peft_folder: Callable[..., Path]
) -> None:
    async def reasons(seed: int, template: str | None = None) -> list[str]:
        pushed = (await ingest.put(peft_folder(seed, chat_template=template), PUSH, spec)).version
        assert store.find(Ref("acme", "x", digest=pushed.digest)) == pushed
        return [warning.reason for warning in pushed.push.warnings]

    own = await reasons(2)
    assert await reasons(1, "{{ messages[1].content.lower() }}") == [*own, "TEMPLATE_FAILS"]


async def test_ranks_and_versions_over_the_limits_are_refused(
    tmp_path: Path,
    store: DiskStore,
    spec: ModelSpec,
    peft_folder: Callable[..., Path],
    templates: ChatTemplates,
) -> None:
    """At the push, not at the first request. Pushing again what is there is no more than before."""
    ingest = Ingest(f"disk:{tmp_path / 'store'}", templates, limits=PushLimits(max_rank=4, max_versions=2))
    dry = Push("acme", "x", PushOptions(dry_run=True))
    try:
        for push in (dry, PUSH):
            with pytest.raises(
                IncompatibleAdapter, match=r"layers\.0\.q_proj has rank 17, .* rank 4 at most"
            ):
                await ingest.put(peft_folder(9, rank=17), push, spec)
        first, _ = [(await ingest.put(peft_folder(seed), PUSH, spec)).version for seed in (1, 2)]
        for push in (dry, PUSH):
            with pytest.raises(TenantFull, match="acme has 2 versions"):
                await ingest.put(peft_folder(3), push, spec)
        assert not (await ingest.put(peft_folder(1), PUSH, spec)).created
        await ingest.put(peft_folder(3), dataclasses.replace(PUSH, tenant="zoo"), spec)
        store.set_alias("acme", "x", "latest", first.digest)
        [other] = [version for version in versions_in(store, "acme") if version.digest != first.digest]
        store.withdraw(Ref("acme", "x", digest=other.digest))
        with pytest.raises(TenantFull):
            await ingest.put(peft_folder(3), PUSH, spec)  # its bytes are still there
        store.collect(0, lambda _: False)
        assert (await ingest.put(peft_folder(3), PUSH, spec)).created
        assert store.count("acme") == 2
    finally:
        ingest.close()


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
    assert len(versions_in(store, "acme")) in (1, 2)
    assert pushed.version in versions_in(store, "acme")


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


KILLED = """
import asyncio, multiprocessing, os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from scheduler.adapters.ingest import Ingest, Push
from scheduler.text.chat import ChatTemplates

async def main():
    push = Push("acme", "x")
    try:
        templates = ChatTemplates(None, {}, ThreadPoolExecutor(1))
        await Ingest("disk:" + sys.argv[1], templates).put(Path(sys.argv[1]) / "no-folder", push, None)
    except Exception:
        pass  # what matters is that the process runs
    print(multiprocessing.active_children()[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_the_process_ends_with_a_scheduler_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4])}
    command = [sys.executable, str(script), str(tmp_path / "store")]
    killed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    orphan = int(killed.stdout)
    wait_until(lambda: not is_running(orphan), "the ingest process ends")
