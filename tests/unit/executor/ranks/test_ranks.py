"""One engine over several ranks, each a real process, on the tiny base."""

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_store import AdapterNotFound, DiskStore, ModelSpec, Weights, WeightsSource
from executor.adapters.source import open_source
from executor.batch.sequence import Dispatch
from executor.build import build_engine
from executor.build_shard import build_shard
from executor.config import ExecutorConfig
from executor.distributed import SINGLE
from executor.errors import RankLost, StartError, UnsupportedModel
from executor.ranks.messages import CopyIntoSlot, Done, Failed, ForgetImage, LoadAdapter
from executor.ranks.worker import Worker
from tests.support.adapters.peft import load_base, make_adapter
from tests.support.engines.driver import SMALL, Driver, greedy, make_driver
from tests.support.services.cluster import wait_until

PROMPT = range(3, 30)
Start = Callable[..., Driver]


@pytest.fixture
def start(tiny_base: Path, tiny_store: DiskStore, store_folder: Path) -> Iterator[Start]:
    """Engines on the tiny base; with several ranks only one at a time, since a process has one group."""
    drivers: list[Driver] = []

    def make(size: int, own_store: WeightsSource = tiny_store, **settings: Any) -> Driver:
        settings = {"store": str(store_folder), "tensor_parallel_size": size, "torch_threads": 1} | settings
        drivers.append(make_driver(str(tiny_base), own_store, **settings))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.engine.close()


def mixed(digests: list[str]) -> list[Dispatch]:
    """The base and all five adapters (ranks 1 to 16; one on q_proj alone, one in layer 1 alone)."""
    return [
        greedy(str(number), PROMPT[: 20 + number], digest=digest, max_new_tokens=12, logprobs=0)
        for number, digest in enumerate(["", *digests])
    ]


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("size", [2, 4])
def test_tokens_and_logprobs_equal_one_ranks(
    start: Start, digests: list[str], size: int, sharded: bool
) -> None:
    """Two slots for five adapters: every slot is reused. With 4 ranks, two hold each KV head."""
    one = start(1)
    many = start(size, fully_sharded_loras=sharded, async_scheduling="true" if sharded else "false")
    expected, actual = (driver.run(*mixed(digests)) for driver in (one, many))
    assert actual == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "an adapter is not loud"
    for key, tokens in one.tokens.items():
        truth = [token.token.logprob for token in tokens]
        assert [token.token.logprob for token in many.tokens[key]] == pytest.approx(truth, abs=1e-5)
    # Evicted and loaded again, by every rank.
    assert many.run(greedy("again", PROMPT[:21], digest=digests[0], max_new_tokens=12)) == [expected[1]]


# Deltas take different ways through the ranks: over KV heads that ranks share, beside each other in
# one layer, before the sum over the ranks. Four ranks do not divide their LoRA ranks.
ALONE = {
    "v": (("v_proj",), 1),
    "qkv": (("q_proj", "k_proj", "v_proj"), 3),
    "gate and up": (("gate_proj", "up_proj"), 2),
    "o and down": (("o_proj", "down_proj"), 3),
}


@pytest.fixture(scope="module")
def alone(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Dispatch]]:
    """A store's folder, and what to ask."""
    folder = tmp_path_factory.mktemp("alone")
    store, spec, base = DiskStore(folder / "store"), ModelSpec.from_folder(tiny_base), load_base(tiny_base)
    wanted = [greedy("base", PROMPT, logprobs=0)]
    for seed, (name, (targets, rank)) in enumerate(ALONE.items()):
        adapter = make_adapter(folder / name, base, seed=9 + seed, rank=rank, targets=targets)
        digest = store.put(adapter, "default", f"a{seed}", spec).digest
        wanted.append(greedy(name, PROMPT, digest=digest, logprobs=0))
    return folder / "store", wanted


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_way_through_the_ranks_alone(
    start: Start, alone: tuple[Path, list[Dispatch]], size: int, sharded: bool
) -> None:
    folder, wanted = alone
    one = start(1, DiskStore(folder))
    expected = one.run(*wanted)
    many = start(size, DiskStore(folder), store=str(folder), fully_sharded_loras=sharded)
    assert many.run(*wanted) == expected
    base = [token.token.logprob for token in one.tokens[wanted[0].key]]
    for dispatch in wanted[1:]:
        truth, got = ([t.token.logprob for t in driver.tokens[dispatch.key]] for driver in (one, many))
        assert truth != pytest.approx(base, abs=0.01), "an adapter is not loud"
        assert got == pytest.approx(truth, abs=1e-5)


class WithoutOne:
    """A store that hides one adapter until `found` is set."""

    def __init__(self, store: WeightsSource, digest: str) -> None:
        self._store, self._digest, self.found = store, digest, False

    def open(self, digest: str) -> Weights:
        if digest == self._digest and not self.found:
            raise AdapterNotFound(f"{digest} is hidden")
        return self._store.open(digest)


def fails_once_then_works(
    driver: Driver, one: Driver, digest: str, reason: str, repair: Callable[[], object]
) -> None:
    """The load fails as a whole, other adapters go on, and nothing of it is left to hinder the next try."""
    dispatch = greedy("fails", PROMPT, digest=digest)
    driver.engine.add(dispatch)
    driver.until(lambda: bool(driver.rejected))
    assert driver.rejected.pop(dispatch.key).reason == reason
    assert digest not in driver.engine.pager.host
    repair()
    assert driver.run(greedy("again", PROMPT, digest=digest)) == one.run(dispatch)


def test_a_file_that_one_rank_cannot_read_fails_on_all(
    start: Start, digests: list[str], store_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(store_folder, tmp_path / "store")
    packed = next(path for path in folder.rglob("packed.safetensors") if digests[3][7:] in str(path))
    whole = packed.read_bytes()
    packed.write_bytes(whole[:-4] + b"oops")
    driver = start(2, store=str(folder))
    fails_once_then_works(driver, start(1), digests[3], "DATA_LOSS", lambda: packed.write_bytes(whole))


def test_a_file_that_rank_0_cannot_read_fails_on_all(
    start: Start, digests: list[str], tiny_store: DiskStore
) -> None:
    store = WithoutOne(tiny_store, digests[3])
    driver = start(2, store)
    repair = lambda: setattr(store, "found", True)  # noqa: E731
    fails_once_then_works(driver, start(1), digests[3], "ADAPTER_NOT_FOUND", repair)


def rank_processes() -> list[Any]:
    return [child for child in multiprocessing.active_children() if child.name.startswith("rank-")]


def test_a_rank_that_dies_takes_the_engine_down(
    tiny_base: Path, tiny_store: DiskStore, store_folder: Path
) -> None:
    config = ExecutorConfig(
        model=str(tiny_base), **(SMALL | {"store": str(store_folder), "tensor_parallel_size": 4})
    )
    lost: list[Exception] = []
    told = threading.Event()

    def on_lost(error: Exception) -> None:
        lost.append(error)
        told.set()

    with closing(build_engine(config, tiny_store, lost=on_lost)) as engine:
        engine.add(greedy("base", PROMPT, max_new_tokens=400))
        assert engine.step().ran
        processes = {child.name: child for child in rank_processes()}
        assert processes.keys() == {"rank-1", "rank-2", "rank-3"}
        os.kill(processes["rank-1"].pid, signal.SIGSTOP)  # it cannot end by itself
        processes["rank-2"].kill()
        assert told.wait(60)
        assert [type(error) for error in lost] == [RankLost]
        wait_until(lambda: not rank_processes(), "the others are ended too")
        with pytest.raises(RankLost):
            for _ in range(50):
                engine.step()
    assert not rank_processes()


def test_an_engine_that_is_closed_ends_its_ranks_and_tells_nobody(start: Start) -> None:
    driver = start(2)
    assert len(rank_processes()) == 1
    driver.engine.close()
    assert not rank_processes()
    driver.engine.close()


@pytest.mark.parametrize("size", [3, 8])
def test_a_size_that_does_not_cut_the_model_starts_nothing(start: Start, size: int) -> None:
    with pytest.raises(UnsupportedModel, match=r"4 query heads, 2 KV heads.*possible are 1, 2, 4"):
        start(size)
    assert not rank_processes()


@pytest.mark.skipif(torch.cuda.device_count() > 3, reason="there are GPUs enough")
def test_a_rank_without_a_gpu_starts_nothing(start: Start) -> None:
    with pytest.raises(StartError, match=r"--tensor-parallel-size 4 needs a GPU for each rank, there are"):
        start(4, device="cuda")
    assert not rank_processes()


def test_too_little_host_memory_for_all_ranks_ends_them(start: Start) -> None:
    with pytest.raises(StartError, match=r"host-memory-bytes 100000 .* takes up to 1771.. bytes"):
        start(2, host_memory_bytes=100_000)  # enough for one rank's part, 88 kB
    assert not rank_processes()


def test_a_rank_that_cannot_start_says_why(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(StartError, match="a rank cannot start"):
        start(2, store=str(file / "no-folder"))
    assert not rank_processes()


def test_a_worker_keeps_images_until_told(tiny_base: Path, store_folder: Path, digests: list[str]) -> None:
    config = ExecutorConfig(model=str(tiny_base), **(SMALL | {"store": str(store_folder)}))
    worker = Worker(build_shard(config, SINGLE), open_source(config), SINGLE, config.max_seats)
    lane, control = multiprocessing.Pipe(), multiprocessing.Pipe()
    threads = [
        threading.Thread(target=worker.serve_lane, args=(lane[1],)),
        threading.Thread(target=worker.serve, args=(control[1],)),
    ]
    for thread in threads:
        thread.start()
    lane[0].send(LoadAdapter(7, digests[0]))
    loaded = lane[0].recv()
    assert isinstance(loaded, Done)
    assert 0 < loaded.nbytes <= worker.nbytes_per_slot
    control[0].send(CopyIntoSlot(1, 7))
    assert control[0].recv() == Done()
    control[0].send(CopyIntoSlot(5, 7))
    assert isinstance(control[0].recv(), Failed)  # there is no such slot
    control[0].send(ForgetImage(7))
    control[0].send(CopyIntoSlot(0, 7))
    assert isinstance(control[0].recv(), Failed)
    lane[0].send(LoadAdapter(8, "sha256:" + "0" * 64))
    refused = lane[0].recv()
    assert isinstance(refused, Failed)
    assert refused.rejection.reason == "ADAPTER_NOT_FOUND"
    for pair in (lane, control):
        pair[0].close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
