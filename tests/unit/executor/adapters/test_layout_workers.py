"""Images laid out in processes: the same as in the executor's own threads, whatever becomes of a process."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from adapter_store import DiskStore, ModelSpec
from adapter_store.files.durable import exclusive
from executor.adapters.layout_workers import LaidOut
from executor.adapters.pooled import PooledAdapters
from executor.errors import HostMemoryFull
from tests.support.adapters.peft import make_adapter, rewrite
from tests.support.engines.driver import PROMPTS, greedy, make_driver
from tests.support.services.cluster import wait_until
from tests.support.services.processes import children, is_running
from tests.unit.executor.adapters.layout_rig import ImageRig

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
UNKNOWN = f"sha256:{'0' * 64}"


@pytest.fixture(scope="module")
def special(
    tiny_base: Path, tiny_store: DiskStore, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Digests of adapters that no process lays out, by what they are."""
    spec = ModelSpec.from_folder(tiny_base)

    def put(name: str, change: float = 1.0, **options: object) -> str:
        folder = make_adapter(tmp_path_factory.mktemp(name), tiny_base, seed=7, **options)  # type: ignore[arg-type]
        rewrite(folder, lambda tensors: {key: tensor * change for key, tensor in tensors.items()})
        return tiny_store.put(folder, "special", name, spec).digest

    return {
        "unknown": UNKNOWN,
        "dora": put("dora", use_dora=True),
        "heads": put("heads", modules_to_save=["lm_head"]),
        "large": put("large", change=1e6),
        "damaged": put("damaged", rank=2),
    }


@pytest.fixture(scope="module")
def rigs(tiny_base: Path, tiny_store: DiskStore, store_folder: Path) -> Iterator[dict[torch.dtype, ImageRig]]:
    """They come up at the same time."""
    made = {dtype: ImageRig(tiny_base, tiny_store, store_folder, dtype) for dtype in DTYPES}
    yield made
    for rig in made.values():
        rig.workers.close()
        assert not is_running(rig.workers._workers[0].pid)


@pytest.fixture
def rig(rigs: dict[torch.dtype, ImageRig]) -> ImageRig:
    return rigs[torch.float32]


def outcome(rig: ImageRig, adapters: PooledAdapters, digest: str) -> tuple[type, str] | None:
    """What a load raises."""
    try:
        rig.load(adapters, digest)
    except Exception as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_process_lays_out_the_image_of_a_thread(
    rigs: dict[torch.dtype, ImageRig], digests: list[str], dtype: torch.dtype
) -> None:
    """Of several ranks, one after another in the same memory, and the first again."""
    for digest in (digests[3], *digests[:4]):
        rigs[dtype].check_same(digest)
        assert rigs[dtype].works(digest)


@pytest.mark.parametrize("kind", ["unknown", "dora", "heads", "large", "damaged", "rank"])
def test_what_is_not_plain_is_left_to_the_thread(
    rigs: dict[torch.dtype, ImageRig],
    special: dict[str, str],
    digests: list[str],
    store_folder: Path,
    kind: str,
) -> None:
    """The same typed errors, the same factors; the process goes on."""
    digest = digests[4] if kind == "rank" else special[kind]
    if kind == "damaged":
        path = store_folder / "blobs" / digest.removeprefix("sha256:") / "packed.safetensors"
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    rig = rigs[torch.float16]
    assert not rig.works(digest)
    here, beside = (outcome(rig, adapters, digest) for adapters in (rig.here, rig.beside))
    assert here == beside and (here is None) == (kind == "dora")
    if kind == "dora":
        rig.check_same(digest)
    assert rig.works(digests[0])


def test_an_image_without_room_is_refused_as_a_threads_is(rig: ImageRig, digests: list[str]) -> None:
    everything = rig.pool.claim("everything", 1 << 22)
    here, beside = (outcome(rig, adapters, digests[0]) for adapters in (rig.here, rig.beside))
    assert here == beside and here is not None and here[0] is HostMemoryFull
    rig.pool.release(everything)
    assert rig.works(digests[0])
    rig.check_same(digests[0])


@pytest.mark.parametrize("at", ["start", "idle", "work", "silence"])
def test_a_process_that_is_gone_costs_no_load(
    rig: ImageRig, digests: list[str], caplog: pytest.LogCaptureFixture, at: str
) -> None:
    with rig.new_workers() as workers:
        [worker] = workers._workers
        if at != "start":
            assert rig.works(digests[0])
        os.kill(worker.pid, signal.SIGKILL if at in ("start", "idle") else signal.SIGSTOP)
        if at == "silence":
            workers._patience_s = 0.1
        loading = threading.Thread(target=rig.load, args=(rig.beside, digests[1]))
        loading.start()
        if at == "work":
            wait_until(workers._idle.empty, "it is asked")
            os.kill(worker.pid, signal.SIGKILL)
        loading.join(30)
        assert not loading.is_alive()
        rig.check_same(digests[1])
        assert not is_running(worker.pid)
    assert (
        len([line for line in caplog.messages if f"process {worker.pid} lays no adapters out" in line]) == 1
    )


def test_another_takes_the_place_of_one_that_is_gone(
    rig: ImageRig, digests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is missed; not at once again, as what ends them may go on."""

    def end() -> None:
        [worker] = workers._workers
        os.kill(worker.pid, signal.SIGKILL)
        assert not rig.works(digests[0]) and not workers._workers

    with rig.new_workers() as workers:
        end()
        assert not rig.works(digests[0]), "this one is missed"
        wait_until(lambda: rig.works(digests[0]), "another is up")
        rig.check_same(digests[1])
        end()
        assert not rig.works(digests[0]) and not workers._workers
        monkeypatch.setattr(workers, "_next_replacement", 0.0)
        wait_until(lambda: rig.works(digests[0]), "another is up")


def test_no_load_waits_for_one_that_takes_the_place_of_another(rig: ImageRig, digests: list[str]) -> None:
    with rig.new_workers() as workers:
        os.kill(workers._workers[0].pid, signal.SIGKILL)
        for _ in ("is gone", "is missed"):
            rig.check_same(digests[0])
        wait_until(lambda: bool(workers._workers), "another is started")
        [worker] = workers._workers
        os.kill(worker.pid, signal.SIGSTOP)  # before it is up
        rig.check_same(digests[1])
        assert is_running(worker.pid)
    assert not is_running(worker.pid)


def test_an_answer_to_another_digest_is_not_taken(
    rig: ImageRig, digests: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with rig.new_workers() as workers:
        assert rig.works(digests[0])
        [worker] = workers._workers
        worker._connection.send(digests[1])  # from here on every answer is the one before
        rig.check_same(digests[2])
        assert not is_running(worker.pid)
    assert f"no answer to {digests[2]}" in caplog.text


@pytest.mark.parametrize("wrong", ["text", "layout", "size"])
def test_nonsense_is_not_taken(rig: ImageRig, digests: list[str], wrong: str) -> None:
    right = LaidOut(digests[0], rig.layout.slot_layout, 64, (), (), 0.0)
    answers = {
        "text": b"nonsense",
        "layout": replace(right, slot_layout="another"),
        "size": replace(right, nbytes=rig.layout.max_block_bytes + 1),
    }
    with rig.new_workers() as workers:
        [worker] = workers._workers
        worker._connection, far = Pipe()
        far.send(answers[wrong])
        rig.check_same(digests[0])
        assert not is_running(worker.pid)


def test_a_process_that_cannot_start_costs_no_load(
    rig: ImageRig,
    digests: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rig.new_workers(replace(rig.config, store=str(tmp_path / "none"))) as workers:
        [worker] = workers._workers
        rig.check_same(digests[0])
        assert not is_running(worker.pid)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with rig.new_workers() as workers:
        rig.check_same(digests[0])
        assert not workers._workers
    assert "a process cannot be started" in caplog.text


def test_signals_to_all_processes_end_none(rig: ImageRig, digests: list[str]) -> None:
    with rig.new_workers() as workers:
        for _ in ("before it is up", "then"):
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(workers._workers[0].pid, number)
            assert rig.works(digests[0])


EXECUTOR = """
import sys, time, torch
from executor.config import ExecutorConfig
from executor.adapters.layout_workers import LayoutWorkers
from executor.lora.layout import SlotLayout, SlotSlice
config = ExecutorConfig(model="m", store=sys.argv[1], cache_dir=sys.argv[2], loader_processes=2)
workers = LayoutWorkers(config, 1 << 20)
print(*(worker.pid for worker in workers._workers), flush=True)
layout = SlotLayout((SlotSlice("layers.0.q_proj", 8, 8),), 4, torch.float32)
digest = "sha256:" + 64 * sys.argv[3]
with workers.image(digest, layout), workers.image(digest, layout):
    print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("at", ["start", "idle", "work"])
def test_processes_end_with_a_killed_executor(
    tiny_store: DiskStore, store_folder: Path, tmp_path: Path, at: str
) -> None:
    (tmp_path / "locks").mkdir()
    command = [sys.executable, "-c", EXECUTOR, str(store_folder), str(tmp_path), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as executor:
        assert executor.stdout
        pids = [int(pid) for pid in executor.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_running, pids))
        if at == "idle":
            assert executor.stdout.readline() == "up\n"
        with exclusive(tmp_path / "locks" / "00"):
            if at == "work":  # one of them waits for the lock, in the store, for ever
                wait_until(lambda: any(map(waits_for_a_lock, pids)), "it is asked")
            executor.kill()
            wait_until(lambda: not any(map(is_running, pids)), "the processes end")


def waits_for_a_lock(pid: int) -> bool:
    locks = Path("/proc/locks").read_text().splitlines()
    return any(f" {pid} " in line for line in locks if "->" in line)


def test_an_engine_pages_in_from_processes(
    tiny_base: Path,
    tiny_store: DiskStore,
    store_folder: Path,
    digests: list[str],
    strangers: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dispatches = [
        greedy(f"{number}", PROMPTS[number % 4], digest=digest, max_new_tokens=8)
        for number, digest in enumerate([*digests, *strangers])
    ]
    settings = {"store": str(store_folder), "max_seats": 32, "num_kv_blocks": 256}
    driver = make_driver(str(tiny_base), tiny_store, **settings)
    with closing(driver.engine):
        expected = driver.run(*dispatches)

    def not_here(*arguments: object, **options: object) -> None:
        raise AssertionError("an image is laid out in the engine's process")

    monkeypatch.setattr("executor.adapters.pooled.build_slot_image", not_here)
    others = layout_processes()  # of the rigs
    driver = make_driver(str(tiny_base), tiny_store, **settings, loader_threads=2, loader_processes=2)
    with closing(driver.engine):
        pids = layout_processes() - others
        assert len(pids) == 2
        assert driver.run(*dispatches) == expected
        assert layout_processes() == others | pids
    assert layout_processes() == others


def layout_processes() -> set[int]:
    return set(children(os.getpid(), "executor.adapters.layout_process"))
