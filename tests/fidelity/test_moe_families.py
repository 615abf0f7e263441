"""Tiny random models with experts, by the engine: adapters of experts, of attention and of both in one batch,
in two slots, preempted and resumed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fidelity.by_engine import assert_engine_equals
from tests.fidelity.conftest import Expected
from tests.fidelity.moe_families import KINDS, make_moe_family
from tests.support.adapters.moe_models import ATTENTION

# What runs it, for the float32 that is compared. On a GPU decoding is captured, attention sinks included.
ON = [
    pytest.param({}, id="cpu"),
    pytest.param(
        {"device": "cuda", "dtype": "float32", "compile_processes": 1},
        id="cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("family", KINDS)
def test_family_with_experts_equals_peft(
    family: str, device: Mapping[str, Any], expect: Callable[..., Expected], tmp_path: Path
) -> None:
    """Scales of rank-stabilised experts, adapters of experts alone, and routers' adapters are right, too."""
    model, streams = make_moe_family(family, tmp_path)
    driver = assert_engine_equals(
        expect,
        model,
        streams,
        tmp_path / "store",
        lora_modules=(*ATTENTION, *KINDS[family]),
        block_size=4,
        num_kv_blocks=26,
        **device,
    )
    assert driver.metric("preemptions_total") > 0
