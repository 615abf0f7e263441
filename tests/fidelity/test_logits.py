"""Teacher-forced logits of the forward pass against transformers + PEFT, on the CPU and on a GPU.

A prompt in two chunks, then token by token; sequences with adapters of their own or none, all in one batch.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fidelity.forced import WIDE, Case, assert_equal, divergence
from tests.support.adapters.peft import Kind

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", {}),
        ("llama", WIDE),
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 8}),
    ],
    ids=["llama", "llama-wide", "qwen2", "qwen3", "mistral-window"],
)
def test_float32_is_the_oracles(kind: Kind, overrides: dict[str, Any], device: str, tmp_path: Path) -> None:
    case = Case.tiny(kind, tmp_path, **overrides)
    oracle = case.logits(torch.float32)
    ours = case.ours(tmp_path / "store", device=device, dtype="float32")
    assert_equal(case, ours, oracle)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_dora_and_full_heads_in_float32(kind: Kind, device: str, tmp_path: Path) -> None:
    """Among others: each row has its own factors, its own matrices, or none."""
    case = Case.dora_and_full_heads(kind, tmp_path)
    ours = case.ours(tmp_path / "store", device=device, dtype="float32", max_full_heads=3)
    assert_equal(case, ours, case.logits(torch.float32))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_dora_and_full_heads_in_bfloat16(kind: Kind, device: str, tmp_path: Path) -> None:
    case = Case.dora_and_full_heads(kind, tmp_path)
    oracle = case.logits(torch.float32)
    theirs = divergence(oracle, case.logits(torch.bfloat16))
    ours = case.ours(tmp_path / "store", device=device, dtype="bfloat16", max_full_heads=3)
    assert divergence(oracle, ours) <= 1.2 * theirs


@pytest.mark.gpu
@GPU[1]
def test_smollm2_with_its_adapters_in_float32(tmp_path: Path) -> None:
    case = Case.smollm2()
    ours = case.ours(tmp_path / "store", device="cuda", dtype="float32")
    assert_equal(case, ours, case.logits(torch.float32))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_as_near_to_the_oracle_as_peft_is(kind: Kind, device: str, tmp_path: Path) -> None:
    case = Case.tiny(kind, tmp_path, **WIDE)
    oracle = case.logits(torch.float32)
    theirs = divergence(oracle, case.logits(torch.bfloat16))
    ours = divergence(oracle, case.ours(tmp_path / "store", device=device, dtype="bfloat16"))
    assert ours <= 1.2 * theirs, (ours, theirs)


@pytest.mark.gpu
@GPU[1]
def test_smollm2_with_its_adapters_in_bfloat16(tmp_path: Path) -> None:
    case = Case.smollm2()
    oracle = case.logits(torch.float32)
    theirs = divergence(oracle, case.logits(torch.bfloat16))
    ours = divergence(oracle, case.ours(tmp_path / "store", device="cuda", dtype="bfloat16"))
    assert ours <= 1.2 * theirs, (ours, theirs)
