"""What a plan takes things to be, beside what executors make of them."""

import json
from pathlib import Path

import pytest

from executor.config import load_config
from executor.distributed import SINGLE
from executor.models import CausalLM, construction, read_config
from executor.slot_count import _fixed_bytes, kv_floor, slot_bytes
from executor.step.shard import dtype_of
from lorafleet.bench.errors import BenchError
from lorafleet.bench.shapes import SHAPES
from lorafleet.plan.sizes import ModelSizes, Settings

SETTINGS = Settings(seats=48, step_tokens=4096)


@pytest.mark.parametrize(
    ("name", "attention_only", "modules"),
    [
        ("llama-3.1-8b", False, ""),
        ("llama-3.1-8b", True, "q_proj,k_proj,v_proj,o_proj"),
        ("qwen3-30b-a3b", False, "q_proj,k_proj,v_proj,o_proj,experts"),
        ("qwen3-30b-a3b", True, "q_proj,k_proj,v_proj,o_proj"),
        ("tiny", False, ""),
    ],
)
@pytest.mark.parametrize("rank", [1, 16])
def test_bytes_are_those_of_the_executor(
    name: str, attention_only: bool, modules: str, rank: int, tmp_path: Path
) -> None:
    """Within a thousandth: a few norms are not counted."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]))
    flags = ["--model", str(tmp_path), "--store", "s", "--dtype", "bfloat16", "--max-lora-rank", str(rank)]
    flags += ["--max-seats", "48", "--max-batched-tokens", "4096"]
    config = load_config([*flags, *(["--lora-modules", modules] if modules else [])], {})
    with construction(dtype_of(config), "meta"):
        model = CausalLM(read_config(tmp_path, expert_parallel=False), SINGLE)
    sizes = ModelSizes.of(name, attention_only=attention_only)
    assert sizes.slot_bytes(rank) == pytest.approx(slot_bytes(config, model), rel=1e-3)
    assert sizes.fixed_bytes(SETTINGS) == pytest.approx(_fixed_bytes(config, model), rel=1e-3)
    assert sizes.kv_floor(SETTINGS) * sizes.kv_token_bytes == kv_floor(config, model)


def test_what_slots_take_the_kv_cache_lacks() -> None:
    sizes, memory = ModelSizes.of("llama-3.1-8b"), 150 * 10**9
    without, some = (sizes.kv_tokens(memory, slots, 16, SETTINGS) for slots in (0, 64))
    assert (without - some) * sizes.kv_token_bytes == pytest.approx(64 * sizes.slot_bytes(16), rel=1e-4)
    assert sizes.kv_tokens(20 * 10**9, 64, 16, SETTINGS) < 0
    assert sizes.adapter_bytes(16) == pytest.approx(2 * sizes.adapter_bytes(8), rel=1e-3)


def test_a_folder_is_read_as_services_read_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["tiny"]))
    named, read = ModelSizes.of("tiny"), ModelSizes.of(str(tmp_path))
    assert named.adapter_bytes(8) == read.adapter_bytes(8)
    with pytest.raises(BenchError, match=r"llama-4.*name a folder with config.json, or llama-3.1-8b"):
        ModelSizes.of("llama-4")
