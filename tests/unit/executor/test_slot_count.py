"""`--max-loras auto`: how many slots an executor makes, and what it takes them to be."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapter_store import DiskStore
from executor.build_shard import build_shard
from executor.config import AUTO_SLOTS, ExecutorConfig, load_config
from executor.distributed import SINGLE, ParallelGroup
from executor.models import CausalLM, construction, load_model, read_config
from executor.slot_count import SLOT_COUNTS, SlotBudget, kv_floor, slot_bytes, with_slot_count
from executor.step.shard import dtype_of
from lorafleet.doors.settings import ConfigError
from tests.support.adapters.peft import DENSE
from tests.support.engines.driver import PROMPTS, SMALL, greedy, make_driver
from tests.support.stores.media import versions_in

GB = 10**9
# An H200 with Llama-3.1-8B in bfloat16, 256 seats and slots of rank 32.
H200 = SlotBudget(memory=135 * GB, fixed=22 * GB, kv_floor=35 * GB, slot=173_285_376, versions=1000)


@pytest.mark.parametrize(
    ("budget", "count"),
    [
        (H200, 384),  # there is room for 450
        (replace(H200, slot=H200.slot // 2), 512),
        (replace(H200, versions=130), 192),  # the next count that holds them all
        (replace(H200, versions=3), 64),  # more may come
        (replace(H200, most=64), 64),
        (replace(H200, memory=61 * GB), 16),
        (replace(H200, memory=57 * GB), 8),  # not even those, beside the floor: the least there is
        (replace(H200, memory=20 * GB), 8),
    ],
)
def test_as_many_as_the_store_has_and_the_memory_holds(budget: SlotBudget, count: int) -> None:
    assert budget.choose() == count
    assert count in SLOT_COUNTS


def test_the_setting_is_a_number_or_a_word() -> None:
    needed = ["--model", "m", "--store", "s"]
    assert load_config([*needed, "--max-loras", "auto"], {}).max_loras == AUTO_SLOTS
    assert load_config(needed, {"LORAFLEET_EXECUTOR_MAX_LORAS": "Auto"}).max_loras == AUTO_SLOTS
    assert load_config([*needed, "--max-loras", "12"], {}).max_loras == 12
    with pytest.raises(ConfigError, match="--max-loras must be above 0, or auto"):
        load_config([*needed, "--max-loras", "0"], {})
    with pytest.raises(ConfigError, match="max_loras cannot be 'many', it is an integer or auto"):
        load_config([*needed, "--max-loras", "many"], {})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora_modules": (*DENSE, "lm_head")},
        {"lora_dtype": "fp8", "max_lora_rank": 32},
    ],
)
def test_a_slot_is_as_large_as_the_shapes_say(tiny_base: Path, settings: dict[str, Any]) -> None:
    config = ExecutorConfig(model=str(tiny_base), **(SMALL | settings))
    shard = build_shard(config, SINGLE)
    dora = shard.slots.dora
    assert dora is not None
    assert slot_bytes(config, _shapes(config, SINGLE)) == shard.arena.nbytes_per_slot + dora.nbytes
    kv_bytes = shard.kv_cache.nbytes
    assert kv_floor(config, _shapes(config, SINGLE)) == kv_bytes


def test_ranks_have_smaller_slots_and_share_the_kv_floor(tiny_base: Path) -> None:
    config = ExecutorConfig(model=str(tiny_base), **(SMALL | {"num_kv_blocks": 0, "max_model_len": 64}))
    sharded = replace(config, tensor_parallel_size=2, fully_sharded_loras=True)
    whole, half = _shapes(config, SINGLE), _shapes(sharded, ParallelGroup(0, 2))
    assert slot_bytes(sharded, half) < 0.6 * slot_bytes(config, whole)
    assert kv_floor(sharded, half) == kv_floor(config, whole) // 2
    assert kv_floor(config, whole) == 16 * 64 * _token_bytes(config)


def _shapes(config: ExecutorConfig, group: ParallelGroup) -> CausalLM:
    with construction(dtype_of(config), "meta"):
        return CausalLM(read_config(Path(config.model)), group)


def _token_bytes(config: ExecutorConfig) -> int:
    model = load_model(Path(config.model), dtype_of(config), "cpu").config
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4


def test_an_engine_on_the_cpu_chooses_and_says_why(
    tiny_base: Path, tiny_store: DiskStore, store_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="executor")
    settings = {"store": f"disk:{store_folder}", "max_loras": AUTO_SLOTS, "host_memory_bytes": 8 << 20}
    digest = versions_in(tiny_store, "default")[0].digest
    driver = make_driver(str(tiny_base), tiny_store, **settings)
    slots = driver.engine.info.max_loras
    assert slots in SLOT_COUNTS and slots == len(driver.engine.batcher.slots)
    fixed = make_driver(str(tiny_base), tiny_store, max_loras=2)
    dispatch = greedy("a", PROMPTS[0], digest=digest)
    assert driver.run(dispatch) == fixed.run(dispatch)
    assert f"--max-loras auto: {slots} slots of " in caplog.text
    versions = sum(tiny_store.count(tenant) for tenant in tiny_store.tenants())
    assert f"the store has {versions} versions" in caplog.text


def test_a_number_stays_and_asks_no_store() -> None:
    config = ExecutorConfig(model="nowhere", store="nowhere", max_loras=5)
    assert with_slot_count(config) is config
