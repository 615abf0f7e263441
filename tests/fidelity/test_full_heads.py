"""Fully trained heads and embeddings (modules_to_save), through real services with few places for them."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lorafleet import Client
from tests.fidelity.conftest import DEVICES, Stream
from tests.fidelity.families import PROMPT_TOKENS, VOCABULARY
from tests.support.adapters.peft import DENSE, TABLES, load_base, make_adapter, make_base
from tests.support.adapters.tokenizers import byte_level, write_folder
from tests.support.services.fleet import read_metrics, running_fleet

SPARSE = ["q_proj", "v_proj"]
ADAPTERS = {
    "plain": {"targets": DENSE},
    "head": {"targets": SPARSE, "modules_to_save": ["lm_head"]},
    "table": {"targets": SPARSE, "modules_to_save": ["embed_tokens"]},
    "both": {"targets": DENSE, "modules_to_save": list(TABLES), "std": 0.1},
    "other-head": {"targets": ["down_proj"], "modules_to_save": ["lm_head"]},
    "lora-on-head": {"targets": ["lm_head", "o_proj"], "modules_to_save": ["embed_tokens"]},
    "dora-head": {"targets": SPARSE, "use_dora": True, "modules_to_save": ["lm_head"]},
}
# One matrix under both names, which PEFT writes for tied bases only.
TIED = {"tied": {"targets": SPARSE, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}}
PROMPT_SEEDS = {"qwen2": 4, "qwen3": 4}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "tied"), [("qwen2", False), ("qwen3", True)])
def test_answers_equal_pefts(
    kind: str,
    tied: bool,
    device: tuple[str, ...],
    expect: Callable,
    ask: Callable,
    assert_equal: Callable,
    tmp_path: Path,
) -> None:
    model = make_base(tmp_path / "model", kind, tied=tied, vocab_size=VOCABULARY, std=0.15)  # type: ignore[arg-type]
    write_folder(model, byte_level())
    base, draw = load_base(model), random.Random(PROMPT_SEEDS[kind])
    adapters = ADAPTERS | (TIED if tied else {})
    streams = [
        Stream(
            name,
            make_adapter(tmp_path / name, base, seed=5, **adapters[name]) if name in adapters else None,
            tuple(draw.randrange(3, 400) for _ in range(PROMPT_TOKENS)),
        )
        for name in ("base", *adapters)
    ]
    modules = ("--lora-modules", ",".join((*DENSE, *TABLES)), "--max-lora-rank", "8", "--max-loras", "3")
    places = ("--max-full-heads", "2", "--num-kv-blocks", "60", "--block-size", "4")
    with running_fleet(model, tmp_path / "store", *modules, *places, *device) as fleet:
        with Client(fleet.target) as client:
            for stream in streams[1:]:
                client.adapters.push(stream.adapter, stream.name)
        # Several times: slots and places pass from one adapter to the other, in another order each time.
        answers = ask(fleet.target, streams)
        expected = expect(model, streams, [answer.token_ids for answer in answers])
        assert_equal(streams, answers, expected)
        again = [*reversed(streams), *streams, *streams[::2]]
        assert_equal(again, ask(fleet.target, again), expected)
        page_ins = read_metrics(fleet.executor_metrics[0])["lorafleet_executor_page_ins_total"]
        assert page_ins > len(streams)
