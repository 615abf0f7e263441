"""Adapters of mlx-lm and mistral-finetune, converted: the tokens that PEFT gives for the same adapter."""

import random
from collections.abc import Callable
from pathlib import Path

from adapter_store.convert.folder import convert
from tests.fidelity.by_engine import assert_engine_equals
from tests.fidelity.conftest import Stream
from tests.support.adapters.foreign_files import as_mistral, as_mlx
from tests.support.adapters.peft import ATTENTION, DENSE, load_base, make_adapter, make_base

PROMPT_SEED = 1


def test_converted_adapters_equal_peft(expect: Callable, tmp_path: Path) -> None:
    model = make_base(tmp_path / "model", "mistral", vocab_size=448, std=0.15)
    base, draw = load_base(model), random.Random(PROMPT_SEED)
    peft = {
        "mistral": make_adapter(tmp_path / "1", base, seed=1, targets=DENSE),
        "mlx": make_adapter(tmp_path / "2", base, seed=2, targets=DENSE, layers=[1], alpha=3.5),
        "mlx-dora": make_adapter(tmp_path / "3", base, seed=3, targets=ATTENTION, use_dora=True),
    }
    foreign = [
        as_mistral(tmp_path / "mistral", peft["mistral"], heads=4, kv_heads=2, head_dim=16),
        as_mlx(tmp_path / "mlx", peft["mlx"]),
        as_mlx(tmp_path / "mlx-dora", peft["mlx-dora"], fine_tune_type="dora"),
    ]
    prompts = {name: tuple(draw.randrange(3, 400) for _ in range(20)) for name in peft}
    for folder in foreign:
        convert(folder, folder.with_name(f"{folder.name}-converted"))
    streams = [Stream(name, tmp_path / f"{name}-converted", prompts[name]) for name in peft]
    assert_engine_equals(expect, model, streams, tmp_path / "store")
    originals = [Stream(name, peft[name], prompts[name]) for name in peft]
    converted = expect(model, streams)
    assert expect(model, originals, [converted[name].tokens for name in peft]) == converted
