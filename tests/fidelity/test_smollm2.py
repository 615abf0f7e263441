"""SmolLM2-135M with the shipped adapters and generated ones, 12 streams at once through 2 slots."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import lorafleet.demo
from lorafleet import Client
from lorafleet.demo.model import default_cache, prepare_model
from tests.fidelity.conftest import DEVICES, Stream
from tests.support.adapters.peft import ATTENTION, DENSE, TABLES, load_base, make_adapter
from tests.support.services.fleet import read_metrics, running_fleet

DEMO = Path(lorafleet.demo.__file__).parent
SHIPPED = sorted(path.parent for path in (DEMO / "adapters").glob("*/adapter_config.json"))
GENERATED = {
    "rank1": {"rank": 1, "alpha": 4, "targets": ["q_proj", "v_proj"], "std": 0.1},
    "rank64": {"rank": 64, "alpha": 64, "targets": DENSE, "std": 0.03},
    "rslora16": {"rank": 16, "alpha": 8, "use_rslora": True, "targets": ATTENTION, "std": 0.05},
    "patterns8": {
        "rank": 8,
        "alpha": 16,
        "targets": ["q_proj", "k_proj", "down_proj"],
        "rank_pattern": {"k_proj": 2, r"layers\.1\d\..*down_proj": 4},
        "alpha_pattern": {"layers.3.self_attn.q_proj": 48},
        "std": 0.04,
    },
    "head4": {"rank": 4, "alpha": 8, "targets": ["q_proj", "lm_head"], "std": 0.05},
    "embed4": {"rank": 4, "alpha": 8, "targets": ["v_proj", "embed_tokens"], "std": 0.08},
    "layers16": {"rank": 16, "alpha": 32, "targets": ["o_proj", "up_proj"], "layers": [3, 17], "std": 0.12},
}
TEXT = "<|im_start|>user\nPlease tell me, in a few friendly sentences, {}<|im_end|>\n<|im_start|>assistant\n"
TOPICS = {
    "base": "why the sky is blue.",
    "rank1": "what a lighthouse is for.",
    "rank64": "how bread is made at home.",
    "rslora16": "who wrote the first novel.",
    "patterns8": "what bees do all summer.",
    "head4": "why we sleep at night.",
    "embed4": "how a bicycle stays upright.",
    "layers16": "what the moon looks like.",
}


@pytest.fixture(scope="module")
def model() -> Path:
    return prepare_model(default_cache(), lambda stage, share: None)


@pytest.fixture(scope="module")
def streams(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Stream]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    folder = tmp_path_factory.mktemp("generated")
    base = load_base(model)

    def chat(question: str) -> tuple[int, ...]:
        messages = [{"role": "user", "content": question}]
        return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])

    def plain(topic: str) -> tuple[int, ...]:
        return tuple(tokenizer(TEXT.format(topic), add_special_tokens=False).input_ids)

    shipped = json.loads((DEMO / "prompts.json").read_text())
    return [
        Stream("base", None, plain(TOPICS["base"])),
        *(Stream(path.name, path, chat(shipped[path.name][0])) for path in SHIPPED),
        *(
            Stream(name, make_adapter(folder / name, base, seed=7, **settings), plain(TOPICS[name]))
            for name, settings in GENERATED.items()
        ),
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", DEVICES)
def test_twelve_streams_equal_peft(
    device: tuple[str, ...],
    model: Path,
    streams: list[Stream],
    expect: Callable,
    ask: Callable,
    assert_equal: Callable,
    tmp_path: Path,
) -> None:
    assert len(streams) >= 12
    # Blocks for about three of the answers: two adapters and the base run at once, and more of them preempt.
    flags = ("--max-loras", "2", "--block-size", "8", "--num-kv-blocks", "40")
    modules = ("--lora-modules", ",".join((*DENSE, *TABLES)), "--max-lora-rank", "64")
    with running_fleet(model, tmp_path / "store", *flags, *modules, *device) as fleet:
        with Client(fleet.target) as client:
            for stream in streams[1:]:
                client.adapters.push(stream.adapter, stream.name)

        def counted(name: str) -> float:
            return read_metrics(fleet.executor_metrics[0])[f"lorafleet_executor_{name}_total"]

        answers = ask(fleet.target, streams)
        expected = expect(model, streams, [answer.token_ids for answer in answers])
        assert_equal(streams, answers, expected)
        assert counted("page_ins") > len(streams) - 2

        again = [stream for stream in streams[:3] for _ in range(2)]
        assert_equal(again, ask(fleet.target, again, at_once=False), expected)
        assert counted("prefix_cache_hit_tokens") > 0

        before = counted("preemptions")
        crowd = [streams[0], *streams[1:3]] * 4
        assert_equal(crowd, ask(fleet.target, crowd), expected)
        assert counted("preemptions") > before
