import pickle
from dataclasses import fields

import pytest
import torch

from executor.layers.attention import KVCache
from executor.models import CausalLM, load_model
from executor.step.inputs import SequenceRows, build_step
from kernels.punica import PunicaWrapperCPU
from tests.support.adapters.tiny_models import save_variant


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load_model(save_variant("llama", tmp_path_factory.mktemp("llama")), torch.float32, "cpu")


@pytest.fixture
def cache(model: CausalLM) -> KVCache:
    return KVCache.allocate(6, 4, model.config, torch.float32, "cpu")


def test_rows_positions_and_kv_slots(cache: KVCache) -> None:
    first = SequenceRows([10, 11, 12], 3, [5, 2], -1, [0, 2])
    second = SequenceRows([20], 0, [1, 0], -1, [])
    third = SequenceRows([30, 31], 0, [3], -1, [1])
    token_ids, ctx = build_step([first, second, third], cache, None)
    assert token_ids.tolist() == [10, 11, 12, 20, 30, 31]
    assert ctx.positions.tolist() == [3, 4, 5, 0, 0, 1]
    assert ctx.attention.kv_slots.tolist() == [5 * 4 + 3, 2 * 4, 2 * 4 + 1, 4, 12, 13]
    assert ctx.logits_rows.tolist() == [0, 2, 5]
    assert ctx.punica is None


def test_rows_arrive_at_another_rank_as_they_are() -> None:
    rows = SequenceRows([10, 11, 12], 3, [5, 2], 4, [0, 2], 6)
    assert all(getattr(rows, field.name) != field.default for field in fields(rows)), "a default hides a loss"
    assert pickle.loads(pickle.dumps(rows)) == rows


def test_cache_size(cache: KVCache, model: CausalLM) -> None:
    config = model.config
    assert cache.nbytes == 2 * config.num_layers * 6 * 4 * config.num_kv_heads * config.head_dim * 4
    assert len(cache.layers) == config.num_layers


def test_punica_learns_the_rows_of_the_step_and_of_the_head(cache: KVCache) -> None:
    punica = PunicaWrapperCPU(max_loras=4, max_num_tokens=16)
    sequences = [
        SequenceRows([1, 2], 0, [0], 3, []),
        SequenceRows([3], 0, [1], 3, [0]),
        SequenceRows([4, 5, 6], 0, [2], -1, [0, 1, 2]),
        SequenceRows([7], 0, [3], 0, [0]),
    ]
    _, ctx = build_step(sequences, cache, punica)
    assert ctx.punica is punica
    assert punica.token_mapping_meta.token_lora_mapping[:7].tolist() == [3, 3, 3, -1, -1, -1, 0]
    assert punica.prompt_mapping_meta.token_lora_mapping[:5].tolist() == [3, -1, -1, -1, 0]


def test_an_empty_step_runs_and_clears_the_metadata(cache: KVCache, model: CausalLM) -> None:
    punica = PunicaWrapperCPU(max_loras=4, max_num_tokens=16)
    build_step([SequenceRows([1], 0, [0], 2, [0])], cache, punica)
    token_ids, ctx = build_step([], cache, punica)
    assert model.compute_logits(model(token_ids, ctx), ctx).shape == (0, 128)
    assert punica.token_mapping_meta.num_active_loras == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (SequenceRows([], 0, [0], -1, []), "needs tokens"),
        (SequenceRows([1], -1, [0], -1, []), "start >= 0"),
        (SequenceRows([1, 2], 3, [0], -1, []), "1 blocks do not cover 5 tokens"),
        (SequenceRows([1], 0, [6], -1, []), "not all below 6"),
        (SequenceRows([1], 0, [-1], -1, []), "not all below 6"),
        (SequenceRows([1, 2], 0, [0], -1, [2]), r"logit_rows \[2\]"),
        (SequenceRows([1, 2], 0, [0], -1, [-1]), r"logit_rows \[-1\]"),
    ],
)
def test_impossible_rows_are_refused(cache: KVCache, rows: SequenceRows, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_step([rows], cache, None)
