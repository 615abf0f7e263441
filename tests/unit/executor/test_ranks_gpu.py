"""One engine over two GPUs, NCCL between them, captured and not: the answers of one GPU, and of the CPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_store import DiskStore, ModelSpec
from tests.support.adapters import make_adapter
from tests.support.engines import Driver, greedy, make_driver
from tests.support.mixed_dispatches import dispatches
from tests.support.tiny_models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

Start = Callable[..., Driver]


@pytest.fixture
def run_on(tiny_base: Path, store_folder: Path, tiny_store: DiskStore) -> Iterator[Start]:
    """Engines of which only the last one is open: a process has one group."""
    drivers: list[Driver] = []

    def start(model: Path = tiny_base, folder: Path = store_folder, **settings: Any) -> Driver:
        while drivers:
            drivers.pop().engine.close()
        settings = {"device": "cuda", "dtype": "float32", "compile_processes": 1} | settings
        store = tiny_store if folder == store_folder else DiskStore(folder)
        drivers.append(make_driver(str(model), store, store=str(folder), **settings))
        return drivers[-1]

    yield start
    while drivers:
        drivers.pop().engine.close()


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
def test_tokens_equal_one_ranks(run_on: Start, digests: list[str], sharded: bool) -> None:
    """Few KV blocks and two slots for four adapters: preemptions, page-ins and drawn tokens of every kind."""
    wanted = dispatches(digests)
    common = {"max_loras": 2, "num_kv_blocks": 14, "max_batched_tokens": 16, "max_seats": 12}
    runs = {
        name: run_on(**common, **settings).run(*wanted)
        for name, settings in {
            "cpu": {"device": "cpu"},
            "one": {},
            "two": {"tensor_parallel_size": 2, "fully_sharded_loras": sharded},
            "ahead": {
                "tensor_parallel_size": 2,
                "fully_sharded_loras": sharded,
                "async_scheduling": "true",
            },
        }.items()
    }
    assert runs["ahead"] == runs["two"] == runs["one"] == runs["cpu"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that FlashInfer and the captured decode serve; logits that bfloat16 does not blur. Heads of 128
    are those that FlashInfer has most likely built before."""
    folder = tmp_path_factory.mktemp("wide")
    model = make_model("llama", hidden_size=256, intermediate_size=512, head_dim=128)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(0.35)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
def test_captured_collectives_answer_as_uncaptured(
    run_on: Start, wide: Path, tmp_path: Path, sharded: bool
) -> None:
    """In bfloat16, with every adapter paged in anew after the capture: log-probabilities of the same tokens
    differ by no more than between one GPU's kernels."""
    store, spec = DiskStore(tmp_path / "store"), ModelSpec.from_folder(wide)
    digests = [""]
    for number, rank in enumerate((1, 4, 8, 16)):
        adapter = make_adapter(tmp_path / f"{number}", wide, seed=number, rank=rank, std=0.05)
        digests.append(store.put(adapter, "default", f"a{number}", spec).digest)
    wanted = [
        greedy(f"{i}", range(3 + i, 20 + 3 * i), digest=digests[i % 5], max_new_tokens=1, prompt_logprobs=0)
        for i in range(10)
    ]
    decoding = [
        greedy(
            f"long-{i}", range(3 + i // 5, 9 + i // 5), digest=digests[i % 5], max_new_tokens=24, logprobs=0
        )
        for i in range(10)
    ]
    two = {"tensor_parallel_size": 2, "fully_sharded_loras": sharded}
    logprobs: dict[str, list[list[float]]] = {}
    tokens: dict[str, list[list[int]]] = {}
    for name, settings in {"one": {}, "eager": {"cuda_graphs": False, **two}, "captured": two}.items():
        driver = run_on(wide, tmp_path / "store", dtype="bfloat16", max_loras=4, **settings)
        driver.run(*wanted)
        tokens[name] = driver.run(*decoding)
        logprobs[name] = [
            [token.token.logprob for token in driver.tokens[dispatch.key]] for dispatch in decoding
        ]
    assert len({tuple(answer) for answer in tokens["one"]}) == len(decoding), "an adapter is not loud"
    for name in ("eager", "captured"):
        compared = 0
        for number in range(len(decoding)):
            for at, (one, other) in enumerate(zip(tokens["one"][number], tokens[name][number], strict=True)):
                if one != other:
                    break
                compared += 1
                assert logprobs[name][number][at] == pytest.approx(logprobs["one"][number][at], abs=0.1)
        assert compared > 120, f"{name}: answers part too early to be compared ({compared} tokens alike)"
