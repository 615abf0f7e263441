"""Several ranks answer as transformers + PEFT do: tiny models of every family, and SmolLM2 on three."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import lorafleet.demo
from adapter_store import open_store
from lorafleet import Client
from lorafleet.demo.model import default_cache, prepare_model
from tests.fidelity.by_engine import assert_engine_equals
from tests.fidelity.conftest import Expected, Stream
from tests.fidelity.families import make_family
from tests.support.adapters.peft import DENSE, TABLES, make_adapter
from tests.support.services.fleet import running_fleet

DEMO = Path(lorafleet.demo.__file__).parent
SHIPPED = ("json", "pirate")


@pytest.mark.parametrize(
    ("family", "size", "sharded"),
    [("qwen2", 2, False), ("qwen3", 4, True), ("mistral", 2, True), ("llama", 4, False)],
)
def test_family_on_several_ranks_equals_peft(
    family: str, size: int, sharded: bool, expect: Callable[..., Expected], tmp_path: Path
) -> None:
    """Everything that a slot can hold but DoRA, which one rank serves; with 4 ranks, two hold each of the 2
    KV heads."""
    model, every = make_family(family, tmp_path)
    streams = [stream for stream in every if not stream.name.startswith("dora")]
    driver = assert_engine_equals(
        expect,
        model,
        streams,
        tmp_path / "store",
        tensor_parallel_size=size,
        fully_sharded_loras=sharded,
        lora_modules=(*DENSE, *TABLES),
        block_size=4,
        num_kv_blocks=40,
    )
    assert driver.metric("preemptions_total") > 0


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """9 query and 3 KV heads."""
    return prepare_model(default_cache(), lambda stage, share: None)


@pytest.fixture(scope="module")
def streams(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Stream]:
    """The base, two shipped adapters, and one over all that a slot holds."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = json.loads((DEMO / "prompts.json").read_text())

    def chat(question: str) -> tuple[int, ...]:
        messages = [{"role": "user", "content": question}]
        return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])

    targets = [*DENSE, "lm_head"]
    everything = make_adapter(
        tmp_path_factory.mktemp("everything"), smollm2, seed=7, rank=5, targets=targets, std=0.02
    )
    return [
        Stream("base", None, chat("Why is the sky blue?")),
        *(Stream(name, DEMO / "adapters" / name, chat(prompts[name][0])) for name in SHIPPED),
        Stream("everything", everything, chat("What is a lighthouse for?")),
    ]


@pytest.fixture
def one_core() -> Iterator[None]:
    """For processes started now. Ranks that exchange sums all the time are as fast on one core as on two, and
    take a fourth less of the machine."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.usefixtures("one_core")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sharded", ["false", "true"])
def test_smollm2_on_three_ranks_equals_peft(
    smollm2: Path,
    streams: list[Stream],
    expect: Callable[..., Expected],
    ask: Callable,
    assert_equal: Callable,
    sharded: str,
    tmp_path: Path,
) -> None:
    # Five adapters in two turns: each step exchanges 60 sums between the ranks, and every turn is 32 steps.
    flags = ("--tensor-parallel-size", "3", "--fully-sharded-loras", sharded, "--max-loras", "3")
    modules = ("--lora-modules", ",".join((*DENSE, "lm_head")), "--max-lora-rank", "16")
    with running_fleet(smollm2, tmp_path / "store", *flags, *modules, "--num-kv-blocks", "60") as fleet:
        with Client(fleet.target) as client:
            for stream in streams[1:]:
                client.adapters.push(stream.adapter, stream.name)
        answers = ask(fleet.target, streams)
        expected = expect(smollm2, streams, [answer.token_ids for answer in answers])
        assert_equal(streams, answers, expected)


def test_smollm2_on_two_ranks_is_refused_clearly(smollm2: Path, tmp_path: Path) -> None:
    open_store(str(tmp_path / "store"))
    command = [sys.executable, "-m", "executor", "--model", str(smollm2), "--store", str(tmp_path / "store")]
    two = ["--tensor-parallel-size", "2", "--listen", "127.0.0.1:0", "--metrics-port", "-1"]
    ended = subprocess.run([*command, *two], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "--tensor-parallel-size 2 does not cut this model (9 query heads, 3 KV heads" in ended.stderr
    assert "possible are 1, 3" in ended.stderr
